"""Event batches for `bench events`: what a busy engine says in one step, from a fixed seed."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from reprise_core.kv_events import BlockRemoved, BlockStored, ExternalHash, KvEventBatch

BLOCK_SIZE = 16
POOL_BLOCKS = 7200
"""So many blocks are held; from then on each step evicts as many as it stores."""
VOCABULARY = 128_256
STATE_EVENT_BLOCKS = 128
SEED = 20240


@dataclass(frozen=True, slots=True)
class StepShape:
    """Blocks that requests fill by decoding, one event each, and prompts, one event each."""

    decoded_blocks: int
    prompts: int = 0
    prompt_blocks: int = 0

    @property
    def num_blocks(self) -> int:
        return self.decoded_blocks + self.prompts * self.prompt_blocks


SHAPES = {
    # 64 running requests, and the rest of a budget of 2048 tokens for the prompts of four more.
    "full": StepShape(decoded_blocks=4, prompts=4, prompt_blocks=31),
    "decode": StepShape(decoded_blocks=4),
}


def step_batches(shape: StepShape, count: int) -> list[KvEventBatch]:
    """Each stores `num_blocks` blocks and, once the pool is full, removes as many, one event each."""
    draw = random.Random(SEED)
    held: deque[ExternalHash] = deque()
    batches = []
    for _ in range(count):
        evicted = [held.popleft() for _ in range(shape.num_blocks)] if len(held) >= POOL_BLOCKS else []
        stores = [_stored(draw, 1) for _ in range(shape.decoded_blocks)]
        stores += [_stored(draw, shape.prompt_blocks) for _ in range(shape.prompts)]
        for store in stores:
            held += store.block_hashes
        batches.append(KvEventBatch(0.0, (*map(_removed, evicted), *stores), 0))
    return batches


def filling_batches(num_blocks: int) -> Iterator[KvEventBatch]:
    """Nothing but stores, chains of STATE_EVENT_BLOCKS."""
    draw = random.Random(SEED + 1)
    for _ in range(-(-num_blocks // STATE_EVENT_BLOCKS)):
        yield KvEventBatch(0.0, (_stored(draw, STATE_EVENT_BLOCKS),), 0)


def _removed(block_hash: ExternalHash) -> BlockRemoved:
    return BlockRemoved(block_hashes=(block_hash,), medium="GPU", group_idx=0)


def _stored(draw: random.Random, num_blocks: int) -> BlockStored:
    return BlockStored(
        block_hashes=tuple(draw.getrandbits(64) for _ in range(num_blocks)),
        parent_block_hash=None,
        token_ids=tuple(draw.choices(range(VOCABULARY), k=num_blocks * BLOCK_SIZE)),
        block_size=BLOCK_SIZE,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=(None,) * num_blocks,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
