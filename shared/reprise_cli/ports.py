"""Free ports on this machine."""

import random
import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port_base(count: int) -> int:
    """The first of `count` neighbouring ports that nobody listens on now.

    Drawn at random, so that two runs do not meet.
    """
    rng = random.Random()
    while True:
        base = rng.randrange(15_000, 31_000, count)
        if not any(_is_taken(base + offset) for offset in range(count)):
            return base


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
