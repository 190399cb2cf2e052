"""Log-probabilities over the scheduler's wires: ZMQ from the worker, the gateway's stream, re-attachment."""

from collections import defaultdict

import pytest

from reprise.v1 import engine_pb2 as pb
from reprise_core.logprobs import row_nbytes
from reprise_scheduler import gateway_streams
from support.scheduler_harness import GatewaySide, SchedulerHarness, running_scheduler
from support.sim_worker import expected_logprobs, expected_output
from support.waiting import until
from support.zmq_worker import ZmqWorker


class Listener(GatewaySide):
    """Keeps rows as a gateway does: those of tokens that it has already are repeats."""

    def __init__(self, harness: SchedulerHarness) -> None:
        super().__init__(harness)
        self.rows: dict[str, bytes] = defaultdict(bytes)
        self.prompt_rows: dict[str, list[bytes]] = defaultdict(list)
        self.num_top: dict[str, int] = {}

    def ask(self, name: str, prompt: list[int], max_tokens: int, **asked: int) -> None:
        sampling = pb.SamplingParams(
            temperature=0.0, top_p=1.0, max_tokens=max_tokens, ignore_eos=True, **asked
        )
        self.num_top[name] = asked.get("logprobs", -1)
        self.submit(name, prompt, sampling=sampling)

    def _take(self, delta: pb.RequestDelta) -> None:
        name = delta.request_id
        if self.num_top.get(name, -1) >= 0:
            size = row_nbytes(self.num_top[name])
            assert len(delta.logprobs) == len(delta.token_ids) * size
            known = len(self.requests[name].token_ids)
            self.rows[name] += delta.logprobs[(known - delta.first_index) * size :]
        else:
            assert not delta.logprobs
        if delta.prompt_logprobs:
            assert delta.first_index == 0
            self.prompt_rows[name].append(delta.prompt_logprobs)
        super()._take(delta)

    def check(self, name: str, prompt: list[int], max_tokens: int, **asked: int) -> None:
        output = expected_output(prompt, max_tokens)
        assert self.requests[name].token_ids == output
        if "logprobs" in asked:
            assert self.rows[name] == expected_logprobs([*prompt, *output], len(prompt), asked["logprobs"])
        if "prompt_logprobs" in asked:
            rows = expected_logprobs(prompt, 1, asked["prompt_logprobs"])
            assert set(self.prompt_rows[name]) == {rows}
        else:
            assert name not in self.prompt_rows


def prompt_of(i: int) -> list[int]:
    return [4 + (i * 7 + j) % 40 for j in range(10 + i)]


KINDS = ({}, {"logprobs": 0}, {"prompt_logprobs": 2}, {"logprobs": 3, "prompt_logprobs": 0})


async def test_many_requests_on_a_short_pool() -> None:
    async with running_scheduler(max_num_batched_tokens=32) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, num_blocks=24).start()
        await harness.wait_for_worker()
        gateway = Listener(harness)
        await gateway.attach()
        asked = {f"r{i}": (prompt_of(i % 9), 20, KINDS[i % 4]) for i in range(24)}
        for name, (prompt, max_tokens, kind) in asked.items():
            gateway.ask(name, prompt, max_tokens, **kind)
        await gateway.ended(*asked, timeout_s=60)
        for name, (prompt, max_tokens, kind) in asked.items():
            gateway.check(name, prompt, max_tokens, **kind)
        assert await harness.metric("vllm:num_preemptions_total") > 0
        await gateway.cut()
        worker.stop()
        assert worker.failure is None


async def test_who_attaches_again_is_told_again_from_where_it_was() -> None:
    async with running_scheduler(stream_grace_s=30.0) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, step_delay_s=0.005).start()
        await harness.wait_for_worker()
        gateway = Listener(harness)
        await gateway.attach()
        kind = KINDS[3]
        for name in ("goes on", "from the start"):
            gateway.ask(name, prompt_of(3), 40, **kind)
        await until(lambda: all(len(one.token_ids) > 5 for one in gateway.requests.values()), 30)
        await gateway.cut()
        known = len(gateway.requests["goes on"].token_ids)
        # The other's tokens were lost on the way.
        gateway.requests["from the start"].token_ids.clear()
        gateway.rows["from the start"] = b""
        await gateway.attach({"goes on": known, "from the start": 0})
        await gateway.ended("goes on", "from the start", timeout_s=30)
        for name, times in (("goes on", 1), ("from the start", 2)):
            gateway.check(name, prompt_of(3), 40, **kind)
            assert len(gateway.prompt_rows[name]) == times
        await gateway.cut()
        worker.stop()


async def test_more_than_a_message_may_have_comes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes back after a while is told much at once."""
    monkeypatch.setattr(gateway_streams, "MAX_LOGPROB_BYTES", 1000)
    async with running_scheduler(stream_grace_s=30.0) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, num_blocks=200).start()
        await harness.wait_for_worker()
        gateway = Listener(harness)
        await gateway.attach()
        names = [f"r{i}" for i in range(12)]
        for i, name in enumerate(names):
            gateway.ask(name, prompt_of(i), 30, logprobs=5)
        await gateway.ended(*names, timeout_s=30)
        await gateway.cut()
        sizes: list[int] = []

        class Back(Listener):
            async def _read(self, call) -> None:
                async for response in call:
                    sizes.append(len(response.deltas))
                    for delta in response.deltas:
                        self._take(delta)

        back = Back(harness)
        back.num_top = dict.fromkeys(names, 5)
        for name in names:
            back.requests[name] = type(gateway.requests[name])()
        await back.attach(dict.fromkeys(names, 0))
        await back.ended(*names, timeout_s=30)
        for i, name in enumerate(names):
            back.check(name, prompt_of(i), 30, logprobs=5)
        assert sizes == [1] * 12  # each has 30 rows of 48 bytes
        await back.cut()
        worker.stop()


@pytest.mark.parametrize(
    ("asked", "more", "message"),
    [
        ({"logprobs": 21}, {}, "logprobs: 21, must be at most 20"),
        ({"prompt_logprobs": 99}, {}, "prompt_logprobs: 99, must be at most 20"),
        ({"prompt_logprobs": 1}, {"num_output_tokens": 2}, "not allowed for a request that has output"),
    ],
)
async def test_what_is_refused(asked: dict[str, int], more: dict[str, int], message: str) -> None:
    async with running_scheduler() as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        sampling = pb.SamplingParams(top_p=1.0, max_tokens=3, **asked)
        gateway.submit("a", prompt_of(1), sampling=sampling, **more)
        await gateway.ended("a")
        error = gateway.requests["a"].finished.error
        assert error.kind == "invalid"
        assert message in error.message
        await gateway.cut()
        worker.stop()
