"""Hash profiles, adapters and packed hashes as gateways, tokenizers and engines exchange them."""

from collections.abc import Sequence
from dataclasses import dataclass

from reprise.v1 import common_pb2 as pb
from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import LoraAdapter
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
from reprise_core.ids import BlockHash


@dataclass(frozen=True, slots=True)
class HashProfile:
    """How an engine hashes blocks; `profile_id` stands for the other three fields."""

    profile_id: str
    algorithm: HashAlgorithm
    hash_block_size: int
    none_hash: BlockHash

    def hasher(self) -> BlockHasher:
        return BlockHasher(
            algorithm=self.algorithm, block_size=self.hash_block_size, none_hash=self.none_hash
        )

    def split(self, digests: bytes) -> list[BlockHash]:
        """Packed hashes of this profile, one by one."""
        size = self.algorithm.digest_nbytes
        if len(digests) % size:
            raise InvalidInput("block_hashes", f"{len(digests)} bytes are no multiple of {size}")
        return [BlockHash(digests[start : start + size]) for start in range(0, len(digests), size)]


@dataclass(frozen=True, slots=True)
class ProfileHashes:
    """Block hashes under one profile, packed: digests one after another, in block order."""

    profile_id: str
    digests: bytes


@dataclass(frozen=True, slots=True)
class HashRequest:
    """What enters block hashes beside the tokens, and under which profiles to hash."""

    profiles: tuple[HashProfile, ...] = ()
    cache_salt: str | None = None
    lora: LoraAdapter | None = None


def profile_from_proto(message: pb.HashProfile) -> HashProfile:
    try:
        algorithm = HashAlgorithm(message.algorithm)
    except ValueError:
        raise InvalidInput(
            "hash_profile.algorithm", f"{message.algorithm!r}, must be one of {', '.join(HashAlgorithm)}"
        ) from None
    return HashProfile(message.id, algorithm, message.hash_block_size, BlockHash(message.none_hash))


def profile_to_proto(profile: HashProfile) -> pb.HashProfile:
    return pb.HashProfile(
        id=profile.profile_id,
        algorithm=str(profile.algorithm),
        hash_block_size=profile.hash_block_size,
        none_hash=profile.none_hash,
    )


def lora_from_proto(message: pb.LoraAdapter) -> LoraAdapter:
    return LoraAdapter(name=message.name, int_id=message.int_id, path=message.path, digest=message.digest)


def lora_to_proto(lora: LoraAdapter) -> pb.LoraAdapter:
    return pb.LoraAdapter(name=lora.name, int_id=lora.int_id, path=lora.path, digest=lora.digest)


def hashes_to_proto(hashes: ProfileHashes) -> pb.ProfileHashes:
    return pb.ProfileHashes(profile_id=hashes.profile_id, digests=hashes.digests)


def hashes_from_proto(messages: Sequence[pb.ProfileHashes]) -> tuple[ProfileHashes, ...]:
    return tuple(ProfileHashes(message.profile_id, message.digests) for message in messages)
