"""`reprise events`: tail, stats, check, keygen. What they do is imported when they run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from reprise_wire.source_sockets import SourceAddress

events = typer.Typer(no_args_is_help=True, help="Follow KV events, ours or vLLM's.")

Endpoint = Annotated[str, typer.Option(help="PUB socket of a publisher, ours or vLLM's.")]
Replay = Annotated[str, typer.Option(help="Its replay socket: fills gaps, and gives the state.")]
Topic = Annotated[str, typer.Option(help="Prefix of the topics wanted.")]
ForSeconds = Annotated[float, typer.Option("--for", min=0, help="End after so many seconds; 0 = never.")]
ServerKey = Annotated[
    Path | None, typer.Option(help="File with the publisher's public CURVE key (`reprise events keygen`).")
]
ClientKey = Annotated[
    Path | None, typer.Option("--key", help="File with our secret CURVE key; without it a fresh one is made.")
]
DEFAULT_ENDPOINT = "tcp://127.0.0.1:8023"


@events.command("tail")
def events_tail(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    replay: Replay = "",
    start: Annotated[int | None, typer.Option("--from", help="First sequence number wanted.")] = None,
    snapshot: Annotated[
        bool, typer.Option("--snapshot", help="Print the whole state first, then what changes.")
    ] = False,
    topic: Topic = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a batch.")] = False,
    with_tokens: Annotated[
        bool, typer.Option("--tokens", help="Print token ids: they are what users wrote.")
    ] = False,
    count: Annotated[int, typer.Option(min=0, help="End after so many batches; 0 = never.")] = 0,
    for_s: ForSeconds = 0.0,
    server_key: ServerKey = None,
    key: ClientKey = None,
) -> None:
    """Print KV events readably as they come."""
    from reprise_cli.events import tail

    with as_bad_parameter():
        code = tail(
            address(endpoint, replay, topic, server_key, key),
            start=start,
            snapshot=snapshot,
            as_json=as_json,
            with_tokens=with_tokens,
            count=count,
            for_s=for_s,
        )
    raise typer.Exit(code)


@events.command("stats")
def events_stats(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    replay: Replay = "",
    topic: Topic = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object an interval.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two figures.")] = 1.0,
    for_s: ForSeconds = 0.0,
    server_key: ServerKey = None,
    key: ClientKey = None,
) -> None:
    """Rates of batches, events, blocks and bytes; lag, gaps, replays, snapshots, state, blocks per tier."""
    from reprise_cli.event_stats import stats

    with as_bad_parameter():
        code = stats(
            address(endpoint, replay, topic, server_key, key),
            as_json=as_json,
            interval_s=interval,
            for_s=for_s,
        )
    raise typer.Exit(code)


@events.command("check")
def events_check(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    replay: Replay = "",
    topic: Topic = "",
    for_s: Annotated[
        float, typer.Option("--for", min=0, help="Seconds to listen; 0 = until state and replay are read.")
    ] = 0.0,
    algorithm: Annotated[
        str, typer.Option(help="Compute block hashes again: sha256, sha256_cbor, xxhash, xxhash_cbor.")
    ] = "",
    seed: Annotated[
        str | None, typer.Option(help="PYTHONHASHSEED of the engine; without it the algorithm's fixed seed.")
    ] = None,
    none_hash: Annotated[
        str, typer.Option(help="Parent of first blocks in hexadecimal, instead of a seed.")
    ] = "",
    hash_block_size: Annotated[
        int, typer.Option(min=0, help="Tokens per hash, where blocks are larger; 0 = the block size.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The report as one JSON object.")] = False,
    server_key: ServerKey = None,
    key: ClientKey = None,
) -> None:
    """Say whether a stream is consistent: numbers, parents, removals, tokens, hashes.

    Exit code 0: it is. 1: it is not, and the first offenders are named. 2: nothing was heard.
    """
    from reprise_cli.event_check import check, hash_check

    with as_bad_parameter():
        hashes = hash_check(algorithm, seed=seed, root=none_hash, hash_block_size=hash_block_size)
        code = check(address(endpoint, replay, topic, server_key, key), hashes, for_s=for_s, as_json=as_json)
    raise typer.Exit(code)


@events.command("keygen")
def events_keygen(
    path: Annotated[Path, typer.Argument(help="Gets the secret key; the public one goes to PATH.pub.")],
) -> None:
    """Write a CURVE key pair, for a publisher or a subscriber, to two files that only their owner reads."""
    from reprise_cli.event_keys import keygen

    keygen(path)


def address(
    endpoint: str, replay: str, topic: str, server_key: Path | None, key: Path | None
) -> "SourceAddress":
    from reprise_cli.event_session import read_keys
    from reprise_wire.source_sockets import SourceAddress

    return SourceAddress(endpoint, endpoint, replay, topic, read_keys(server_key, key))


@contextmanager
def as_bad_parameter() -> Iterator[None]:
    from reprise_core.errors import InvalidInput

    try:
        yield
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from error
