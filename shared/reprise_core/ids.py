"""Names for the plain values that travel between parts."""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in the pool; 0 is the null block, which is never handed out."""

TokenId = NewType("TokenId", int)
GroupId = NewType("GroupId", int)
"""Layers that share one block table."""

RequestId = NewType("RequestId", str)
"""Internal request id: the caller's id and a counter, unique within a scheduler's life."""

BlockHash = NewType("BlockHash", bytes)
"""Digest of a block and of everything before it: 32 bytes (SHA-256) or 16 (XXH3-128)."""

GroupKey = NewType("GroupKey", bytes)
"""A block hash followed by its group id as 4 big-endian bytes: the key of the cache map."""


def group_key(block_hash: BlockHash, group_id: GroupId) -> GroupKey:
    return GroupKey(block_hash + group_id.to_bytes(4, "big"))


def split_group_key(key: GroupKey) -> tuple[BlockHash, GroupId]:
    return BlockHash(key[:-4]), GroupId(int.from_bytes(key[-4:], "big"))
