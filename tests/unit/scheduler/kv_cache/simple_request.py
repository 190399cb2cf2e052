"""Requests for tests of the cache manager."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from reprise_core.extra_keys import LoraAdapter
from reprise_core.ids import BlockHash, RequestId


@dataclass
class SimpleRequest:
    """Hashes are digests of the whole prefix and its namespace, or `digest_bytes` of them."""

    name: str
    token_ids: list[int]
    block_size: int = 4
    cache_salt: str | None = None
    lora: LoraAdapter | None = None
    skip_lookup: bool = False
    report_full: bool = False
    num_preemptions: int = 0
    junction_tokens: int = 0
    tenant: str = ""
    digest_bytes: int = 32
    hashed: list[BlockHash] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.request_id = RequestId(self.name)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        while (end := (len(self.hashed) + 1) * self.block_size) <= len(self.token_ids):
            text = repr((self.cache_salt, self.lora, self.token_ids[:end]))
            self.hashed.append(BlockHash(sha256(text.encode()).digest()[: self.digest_bytes]))
        return self.hashed
