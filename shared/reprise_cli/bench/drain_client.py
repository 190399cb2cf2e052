"""A gateway that submits and drains: `python -m reprise_cli.bench.drain_client ADDRESS FIRST N LENGTH`."""

import asyncio
import sys
from collections.abc import AsyncIterator

from reprise.v1 import common_pb2
from reprise.v1 import engine_pb2 as pb
from reprise.v1.engine_pb2_grpc import EngineStub
from reprise_runtime.grpc_server import channel
from reprise_wire.hash_profiles import profile_from_proto

MAX_TOKENS = 90_000


async def main(address: str, first: int, num_requests: int, prompt_length: int) -> None:
    """Requests number `first` to `first` + `num_requests` - 1."""
    async with channel(address) as grpc_channel:
        stub = EngineStub(grpc_channel)  # type: ignore[no-untyped-call]
        info = await stub.GetInfo(pb.GetInfoRequest())
        numbers = range(first, first + num_requests)
        call = stub.Stream(_requests(info.hash_profile, numbers, prompt_length))
        async for response in call:
            for delta in response.deltas:
                assert not delta.finished.error.kind, delta.finished.error.message


async def _requests(
    profile: common_pb2.HashProfile, numbers: range, prompt_length: int
) -> AsyncIterator[pb.StreamRequest]:
    hasher = profile_from_proto(profile).hasher()
    yield pb.StreamRequest(attach=pb.Attach(gateway_id=f"bench-{numbers.start}"))
    for number in numbers:
        prompt = [(number * 31 + i) % 40_000 for i in range(prompt_length)]
        chain = hasher.chain()
        chain.append(prompt)
        hashes = common_pb2.ProfileHashes(profile_id=profile.id, digests=b"".join(chain.hashes))
        sampling = pb.SamplingParams(top_p=1.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        yield pb.StreamRequest(
            submit=pb.Submit(request_id=str(number), token_ids=prompt, sampling=sampling, block_hashes=hashes)
        )
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5])))
