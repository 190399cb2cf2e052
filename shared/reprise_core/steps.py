"""What one step asks of a worker, and what the worker answers.

A plan names requests by `handle`, a number that the scheduler gives when it first sends a request
and never gives again within a session. The worker keeps, per handle, the token ids, the block
tables and the sampling parameters; a plan carries only what is new. The worker appends the tokens
it samples itself, so a following plan may be made before their values are known.

Plans are executed strictly one after another. Order within a plan: `removed`, `saves` (copied out
before anything is overwritten), `copies`, `added`, then `loads` are started, then `scheduled` is
computed. A load runs beside this and later steps and is reported when it is done, in a
`TransferReport` of its own; it must not start before the plan's turn, because the step before may
still write into a block that the scheduler has taken back.

Ids travel packed: `pack_ids` / `unpack_ids`, little-endian signed 32-bit.
"""

import sys
from array import array
from collections.abc import Iterable

import msgspec

from reprise_core.ids import BlockHash, GroupId


def pack_ids(ids: Iterable[int]) -> bytes:
    """Block or token ids as little-endian int32."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Raises ValueError when the length is no multiple of four."""
    packed = array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


class WorkerSampling(msgspec.Struct, frozen=True, array_like=True):
    """The part of `SamplingParams` that a worker needs.

    The noise for output token i is a function of (seed, i) alone, so a resumed request draws what
    it would have drawn.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    # End-of-sequence and stop tokens that must not be drawn before min_tokens output tokens.
    min_tokens: int = 0
    banned_token_ids: bytes = b""
    # Most probable tokens beside each drawn token, and beside each prompt token but the first; None = no
    # log-probabilities. The prompt's are asked for until the request has its first output token.
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


class AddedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that the worker does not know, or no longer: new, or resumed after preemption."""

    handle: int
    token_ids: bytes
    """Every token known: the prompt and the output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is in the blocks already."""
    block_ids: tuple[bytes, ...]
    """Per group, the whole block table; block 0 is the null block."""
    sampling: WorkerSampling
    adapter_id: int = 0
    """Of `ModelInfo.adapters`; 0 = none, here and below."""


class ScheduledRequest(msgspec.Struct, frozen=True, array_like=True):
    """Compute tokens [num_computed_tokens, num_computed_tokens + num_new_tokens) of a request."""

    handle: int
    num_computed_tokens: int
    num_new_tokens: int
    new_block_ids: tuple[bytes, ...]
    """Per group, appended to the block table before the step; empty bytes where there are none.
    Empty for a request that the same plan adds."""
    sample: bool
    """Whether the last of these tokens is the last one known, so that the next is to be drawn."""


class BlockLoad(msgspec.Struct, frozen=True, array_like=True):
    """Fill these blocks from the store; parallel lists, in block order."""

    handle: int
    group_id: int
    block_ids: bytes
    block_hashes: tuple[BlockHash, ...]
    generation: int
    """As the look-up answered it; the store refuses another one."""
    adapter_id: int = 0


class BlockSave(msgspec.Struct, frozen=True, array_like=True):
    """Copy a computed block out and send it to the store in the background."""

    group_id: GroupId
    block_id: int
    block_hash: BlockHash
    generation: int
    adapter_id: int = 0


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    step_id: int
    """Counts up by one from 1 within a session."""
    removed: tuple[int, ...] = ()
    """Handles to forget: finished, aborted or preempted."""
    saves: tuple[BlockSave, ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    """(group id, from block id, to block id), whole blocks."""
    added: tuple[AddedRequest, ...] = ()
    scheduled: tuple[ScheduledRequest, ...] = ()
    loads: tuple[BlockLoad, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled)


class RequestLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """What one request asked for of this step, in rows as `reprise_core.logprobs` defines them."""

    handle: int
    output: bytes = b""
    """One row, of the drawn token."""
    prompt: bytes = b""
    """A row for each scheduled position whose next token is the prompt's, of that next token."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    step_id: int
    handles: bytes
    """Packed; the requests that drew a token, in plan order."""
    token_ids: bytes
    """Packed; one per handle."""
    model_time_s: float
    num_saves_dropped: int = 0
    """Saves of this plan that the worker's bounded staging had no room for."""
    logprobs: tuple[RequestLogprobs, ...] = ()
    """Only of requests that asked for them."""


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """The end of one `BlockLoad`: block ids that could not be filled, empty when all were."""

    handle: int
    group_id: int
    failed_block_ids: bytes = b""
    reason: str = ""
    """The first failure's reason word: missing, damaged, foreign, refused, timeout, unavailable."""


class TransferMeasure(msgspec.Struct, frozen=True, array_like=True):
    """One transfer with the store that is over, whatever came of it."""

    num_blocks: int
    num_bytes: int
    """Of the blocks that arrived."""
    seconds: float
    """Asked or sent to answered, or to the time-out."""


class TransferReport(msgspec.Struct, frozen=True, array_like=True):
    loads: tuple[LoadReport, ...] = ()
    loaded: tuple[TransferMeasure, ...] = ()
    """One per load."""
    saved: tuple[TransferMeasure, ...] = ()
