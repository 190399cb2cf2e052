"""Prompts that come without hashes are hashed by the tokenizer service, never in this process."""

from collections.abc import Sequence

import grpc

from reprise.v1 import common_pb2, tokenizer_service_pb2
from reprise.v1.tokenizer_service_pb2_grpc import TokenizerServiceStub
from reprise_core.errors import DataLoss
from reprise_core.extra_keys import LoraAdapter
from reprise_core.ids import BlockHash
from reprise_runtime.grpc_server import channel
from reprise_scheduler.profile import HashProfile
from reprise_wire.error_codec import from_rpc_error

TIMEOUT_S = 30.0


class TokenizerHasher:
    def __init__(self, address: str) -> None:
        self._channel = channel(address)
        self._stub = TokenizerServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def hash_prompt(
        self,
        profile: HashProfile,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None,
        lora: LoraAdapter | None,
    ) -> list[BlockHash]:
        """Hashes of the prompt's full blocks. Raises PeerError when the tokenizer cannot be had."""
        request = tokenizer_service_pb2.HashTokensRequest(
            token_ids=token_ids,
            hash=tokenizer_service_pb2.HashRequest(
                profiles=[profile_to_proto(profile)],
                cache_salt=cache_salt or "",
                lora=common_pb2.LoraAdapter(name=lora.name, int_id=lora.int_id, path=lora.path)
                if lora
                else None,
            ),
        )
        try:
            answer = await self._stub.HashTokens(request, timeout=TIMEOUT_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "tokenizer") from error
        for hashes in answer.hashes:
            if hashes.profile_id == profile.profile_id:
                return split_digests(hashes.digests, profile)
        raise DataLoss(f"the tokenizer sent no hashes of profile {profile.profile_id}")

    async def close(self) -> None:
        await self._channel.close()


def profile_to_proto(profile: HashProfile) -> common_pb2.HashProfile:
    return common_pb2.HashProfile(
        id=profile.profile_id,
        algorithm=str(profile.algorithm),
        hash_block_size=profile.hash_block_size,
        none_hash=profile.none_hash,
    )


def split_digests(digests: bytes, profile: HashProfile) -> list[BlockHash]:
    size = profile.algorithm.digest_nbytes
    if len(digests) % size:
        raise DataLoss(f"block hashes of {len(digests)} bytes are no multiple of {size}")
    return [BlockHash(digests[start : start + size]) for start in range(0, len(digests), size)]
