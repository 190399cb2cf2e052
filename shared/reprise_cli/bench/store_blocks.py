"""The blocks of `reprise bench store`: made-up models whose blocks have a given size."""

from reprise_core.ids import BlockHash
from reprise_wire.block_transfer import Keyspace
from reprise_worker.layer_groups import LayerShape

BLOCK_TOKENS = 16
LAYER = LayerShape(num_kv_heads=8, key_dim=64, value_dim=64)
LAYER_NBYTES = LAYER.numel(BLOCK_TOKENS) * 4
"""64 KiB in float32."""


def layers_of(block_nbytes: int) -> list[LayerShape]:
    assert block_nbytes % LAYER_NBYTES == 0
    return [LAYER] * (block_nbytes // LAYER_NBYTES)


def keyspace_of(block_nbytes: int) -> Keyspace:
    return Keyspace("bench", f"{block_nbytes:032x}")


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))
