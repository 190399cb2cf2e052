"""A whole scheduler service in this process on free ports, and a gateway's side of its stream."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from reprise.v1 import common_pb2
from reprise.v1 import engine_pb2 as pb
from reprise.v1.engine_pb2_grpc import EngineStub
from reprise_core.extra_keys import HashInputs
from reprise_runtime.grpc_server import channel
from reprise_scheduler.app import SchedulerApp
from reprise_scheduler.settings import SchedulerSettings
from reprise_wire.hash_profiles import lora_from_proto, profile_from_proto
from support.valkey_server import free_port
from support.waiting import until


@dataclass
class Received:
    """What a gateway has heard of one request."""

    token_ids: list[int] = field(default_factory=list)
    usage: pb.PromptUsage | None = None
    finished: pb.Finished | None = None
    repeated: int = 0


class GatewaySide:
    """One attached stream; `cut` breaks it, a new one with the same id resumes."""

    def __init__(self, harness: "SchedulerHarness", gateway_id: str = "gw", stub: Any = None) -> None:
        self._harness = harness
        self._stub = stub or harness.stub
        self.gateway_id = gateway_id
        self.requests: dict[str, Received] = {}
        self.on_delta: Callable[[], object] = lambda: None
        self._hearing = asyncio.Event()
        self._hearing.set()
        self._up: asyncio.Queue[pb.StreamRequest | None] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None

    async def attach(self, resume: dict[str, int] | None = None) -> "GatewaySide":
        points = [pb.ResumePoint(request_id=name, next_index=i) for name, i in (resume or {}).items()]
        self._up = asyncio.Queue()
        self._up.put_nowait(pb.StreamRequest(attach=pb.Attach(gateway_id=self.gateway_id, resume=points)))
        call = self._stub.Stream(self._requests(self._up))
        await call.initial_metadata()
        self._reader = asyncio.create_task(self._read(call))
        return self

    async def _requests(self, up: asyncio.Queue) -> AsyncIterator[pb.StreamRequest]:
        while (message := await up.get()) is not None:
            yield message

    async def _read(self, call) -> None:
        async for response in call:
            for delta in response.deltas:
                self._take(delta)
                self.on_delta()
            await self._hearing.wait()

    def _take(self, delta: pb.RequestDelta) -> None:
        received = self.requests.setdefault(delta.request_id, Received())
        new = list(delta.token_ids)
        skip = len(received.token_ids) - delta.first_index
        assert skip >= 0, "a gap in the tokens"
        received.repeated += min(skip, len(new))
        received.token_ids += new[skip:]
        if delta.HasField("prompt_usage"):
            received.usage = delta.prompt_usage
        if delta.HasField("finished"):
            received.finished = delta.finished

    def stop_reading(self) -> None:
        """From the next message on."""
        self._hearing.clear()

    def read_again(self) -> None:
        self._hearing.set()

    async def cut(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def send(self, **kind) -> None:
        self._up.put_nowait(pb.StreamRequest(**kind))

    def submit(self, name: str, prompt: list[int], max_tokens: int = 8, salt: str = "", **more) -> None:
        sampling = more.pop("sampling", None) or pb.SamplingParams(
            temperature=0.0, top_p=1.0, max_tokens=max_tokens, ignore_eos=True
        )
        hashes = more.pop("block_hashes", None) or self._harness.hashes(prompt, salt, more.get("lora"))
        self.requests.setdefault(name, Received())
        submit = pb.Submit(
            request_id=name,
            token_ids=prompt,
            sampling=sampling,
            block_hashes=hashes,
            cache_salt=salt,
            **more,
        )
        self.send(submit=submit)

    async def ended(self, *names: str, timeout_s: float = 10.0) -> None:
        await until(lambda: all(self.requests[name].finished for name in names), timeout_s)


class SchedulerHarness:
    def __init__(self, app: SchedulerApp, settings: SchedulerSettings) -> None:
        self.app = app
        self.settings = settings
        # A test before this one may have had the same port, and a client that still tries to reach it.
        self.channel = channel(settings.listen_address, own_connection=True)
        self.stub = EngineStub(self.channel)
        self.info: pb.GetInfoResponse | None = None

    async def wait_for_worker(self) -> None:
        await until(lambda: self.app.readiness.ready)
        self.info = await self.stub.GetInfo(pb.GetInfoRequest())

    def hashes(
        self, prompt: list[int], salt: str = "", lora: common_pb2.LoraAdapter | None = None
    ) -> common_pb2.ProfileHashes:
        assert self.info is not None, "wait_for_worker first"
        profile = profile_from_proto(self.info.hash_profile)
        adapter = lora_from_proto(lora) if lora is not None else None
        chain = profile.hasher().chain(HashInputs(lora=adapter, cache_salt=salt or None))
        chain.append(prompt)
        return common_pb2.ProfileHashes(profile_id=profile.profile_id, digests=b"".join(chain.hashes))

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name whose labels are as given."""
        text = (await self.stub.GetMetrics(pb.GetMetricsRequest())).text
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@asynccontextmanager
async def running_scheduler(**settings: object) -> AsyncIterator[SchedulerHarness]:
    values: dict[str, object] = {
        "listen_address": f"127.0.0.1:{free_port()}",
        "metrics_address": f"127.0.0.1:{free_port()}",
        "workers_endpoint": f"tcp://127.0.0.1:{free_port()}",
        "publisher_endpoint": "",
        "worker_timeout_s": 1.0,
        "stream_grace_s": 0.5,
        **settings,
    }
    chosen = SchedulerSettings(**values)
    app = SchedulerApp(chosen)
    await app.start()
    harness = SchedulerHarness(app, chosen)
    try:
        yield harness
    finally:
        await harness.channel.close()
        await app.stop()
