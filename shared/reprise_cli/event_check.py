"""`reprise events check`: whether what a publisher says is consistent."""

import json
import time
from typing import TextIO

from rich.console import Console
from rich.text import Text

from reprise_cli.event_checker import HashCheck, StreamChecker
from reprise_cli.event_session import Session
from reprise_core.errors import InvalidInput
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.ids import BlockHash
from reprise_core.none_hash import none_hash, seed_text
from reprise_wire.event_source_values import Delivery, DeliveryKind, SourceOptions, SourceState
from reprise_wire.source_sockets import SourceAddress

UNHEARD_S = 10.0
"""Without --for: how long to wait for a publisher that says nothing."""


def hash_check(algorithm: str, *, seed: str | None, root: str, hash_block_size: int = 0) -> HashCheck | None:
    """From the options; None without an algorithm. `seed` is PYTHONHASHSEED, `root` a none hash in
    hexadecimal. Raises InvalidInput."""
    if not algorithm:
        for option, value in (("--seed", seed), ("--none-hash", root or None)):
            if value is not None:
                raise InvalidInput(option, "needs --algorithm")
        return None
    if algorithm not in tuple(HashAlgorithm):
        raise InvalidInput("--algorithm", f"{algorithm!r}, must be one of {', '.join(HashAlgorithm)}")
    chosen = HashAlgorithm(algorithm)
    if root:
        try:
            first = BlockHash(bytes.fromhex(root))
        except ValueError:
            first = BlockHash(b"")
        if len(first) != chosen.digest_nbytes:
            raise InvalidInput(
                "--none-hash", f"{root!r}, must be {chosen.digest_nbytes} bytes in hexadecimal"
            )
    else:
        text = seed_text(chosen, seed)
        if text is None:
            raise InvalidInput("--seed", f"{algorithm} has a random seed: give the engine's, or --none-hash")
        first = none_hash(chosen, text)
    return HashCheck(chosen, first, hash_block_size=hash_block_size)


def check(
    address: SourceAddress,
    hashes: HashCheck | None,
    *,
    for_s: float = 0.0,
    as_json: bool = False,
    file: TextIO | None = None,
) -> int:
    """Follow for `for_s` seconds, or with 0 until state and replay are read; 0 when all is consistent, 1 when
    not, 2 when nothing was heard."""
    if not for_s and not address.replay_endpoint:
        raise InvalidInput("--for", "without --replay there is no end: give the seconds to listen")
    checker = StreamChecker(hashes)

    def take(delivery: Delivery) -> None:
        # A snapshot tells parents before children, and says where it cannot.
        is_whole = session.source.is_complete or delivery.kind is DeliveryKind.SNAPSHOT
        checker.take(delivery, is_whole=is_whole)

    session = Session(address, SourceOptions(), on_delivery=take, on_notice=checker.note)
    give_up_s = time.monotonic() + UNHEARD_S

    def is_done() -> bool:
        if for_s:
            return False
        unheard = not checker.num_batches and time.monotonic() >= give_up_s
        return session.source.is_following or unheard

    session.run(is_done, for_s=for_s)
    _report(checker, session.source.state, Console(file=file, highlight=False, soft_wrap=True), as_json)
    if not checker.num_batches:
        return 2
    return 0 if checker.is_consistent else 1


def _report(checker: StreamChecker, state: SourceState, console: Console, as_json: bool) -> None:
    facts = {
        "batches": checker.num_batches,
        "events": checker.num_events,
        "hashes_checked": checker.num_hashes_checked,
        "not_judged": checker.num_not_judged,
        "state": state.value,
    }
    if as_json:
        problems = {
            kind: {
                "count": problem.count,
                "first": [
                    {"seq": offender.sequence, "detail": offender.detail} for offender in problem.first
                ],
            }
            for kind, problem in checker.problems.items()
        }
        console.out(json.dumps({"consistent": checker.is_consistent, **facts, "problems": problems}))
        return
    console.print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()))
    for kind, problem in checker.problems.items():
        console.print(Text(f"{kind}: {problem.count}", "bold red"))
        for offender in problem.first:
            console.print(f"  seq {offender.sequence}: {offender.detail}")
    if not checker.num_batches:
        console.print(Text("nothing was heard", "bold red"))
    elif checker.is_consistent:
        console.print(Text("consistent", "green"))
