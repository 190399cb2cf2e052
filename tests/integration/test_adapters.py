"""LoRA adapters in whole engines with a real store and a real Valkey: answers, and whose blocks meet."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from reprise.v1 import common_pb2
from reprise.v1 import engine_pb2 as pb
from reprise_core.ids import BlockHash
from reprise_core.kv_events import AllBlocksCleared, BlockStored, KvEvent
from reprise_worker.model import PagedModel, load_model
from support.external_engine import BLOCK, RealEngine, attached, real_engine, running_worker, scheduler_beside
from support.external_world import cold_engine, external_tokens, prompts_of, store_address, stored_hashes
from support.lora_adapters import merged, write_adapter
from support.scheduler_harness import Received
from support.store_harness import running_store
from support.tiny_models import HYBRID, paged, plain_greedy, write_model_folder
from support.valkey_server import ValkeyProcess, free_port
from support.waiting import until

NUM_TOKENS = 6
NUM_BLOCKS = 12
NAMES = ("", "a", "b")
"""The base model, and two adapters."""


@dataclass(frozen=True)
class Adapted:
    folder: Path
    plain: dict[str, PagedModel]
    """By adapter name; "other": the other content of adapter a."""
    paths: dict[str, Path]

    def modules(self, *names: str) -> str:
        return ",".join(f"{name}={self.paths[name]}" for name in names)

    def right(self, name: str, prompts: list[list[int]]) -> list[list[int]]:
        return [plain_greedy(self.plain[name], prompt, NUM_TOKENS) for prompt in prompts]

    def change_content(self) -> None:
        """Of adapter a, under the same path."""
        write_adapter(self.paths["a"], self.plain[""].hf, seed=7)


def adapted_model(folder: Path, **changes: object) -> Adapted:
    model = write_model_folder(folder / "model", **changes)
    base = load_model(model, device=torch.device("cpu"), dtype="auto")
    paths = {
        name: write_adapter(folder / name, base.hf, seed=seed)
        for name, seed in (("a", 1), ("b", 2), ("other", 7))
    }
    plain = {name: paged(merged(base.hf, path)) for name, path in paths.items()}
    return Adapted(model, {"": base, **plain}, paths)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted_model(tmp_path_factory.mktemp("adapted"))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path).start()
    yield server
    server.kill()


@pytest.fixture
def prompts() -> list[list[int]]:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return prompts_of(random.Random(seed), 2, NUM_BLOCKS)


@asynccontextmanager
async def adapted_engine(
    model: Adapted, redis: ValkeyProcess, modules: str, **settings: object
) -> AsyncIterator[RealEngine]:
    async with cold_engine(model.folder, redis, worker={"lora_modules": modules}, **settings) as engine:
        yield engine


def keys(redis: ValkeyProcess) -> dict[str, set[BlockHash]]:
    """Hashes of blocks by the adapter's digest."""
    return {keyspace.adapter: hashes for keyspace, hashes in stored_hashes(redis).items()}


async def ask(engine: RealEngine, model: Adapted, name: str, prompts: list[list[int]]) -> list[Received]:
    answers = await engine.ask(prompts, NUM_TOKENS, adapter=name)
    assert [answer.token_ids for answer in answers] == model.right(name, prompts), name
    return answers


def device_tokens(answers: list[Received]) -> int:
    return sum(answer.usage.device_tokens for answer in answers)


async def test_base_and_adapters_share_steps_and_no_block(adapted: Adapted, prompts: list[list[int]]) -> None:
    """All at once, in small chunks; then each finds its own blocks and nobody else's."""
    async with (
        running_store() as store,
        real_engine(
            adapted.folder,
            store_address(store),
            worker={"lora_modules": adapted.modules("a", "b")},
            max_num_batched_tokens=24,
            kv_role="kv_producer",
        ) as engine,
    ):
        submitted = {name: engine.submit(prompts, NUM_TOKENS, adapter=name) for name in NAMES}
        for name in NAMES:
            answers = await engine.answers(submitted[name])
            assert [answer.token_ids for answer in answers] == adapted.right(name, prompts), name
            assert device_tokens(answers) == 0
        for name in NAMES:
            assert device_tokens(await ask(engine, adapted, name, prompts)) == 2 * NUM_BLOCKS * BLOCK
        engine.check_nothing_leaked()


async def test_a_cold_engine_loads_what_another_left_of_the_same_adapter(
    adapted: Adapted, prompts: list[list[int]], redis: ValkeyProcess
) -> None:
    full = len(prompts) * NUM_BLOCKS
    async with adapted_engine(adapted, redis, adapted.modules("a", "b")) as one:
        for name in NAMES:
            await ask(one, adapted, name, prompts)
        await until(lambda: sum(map(len, keys(redis).values())) == 3 * (full + len(prompts)), 30)
        digests = {name: one.adapter(name).digest for name in ("a", "b")}
    kept = keys(redis)
    assert set(kept) == {"", *digests.values()}
    assert sum(map(len, kept.values())) == len(set().union(*kept.values())), "no two have a hash in common"
    # The other way round: the ids differ, and mean nothing outside of an engine.
    async with adapted_engine(adapted, redis, adapted.modules("b", "a")) as other:
        for name in NAMES:
            answers = await ask(other, adapted, name, prompts)
            assert external_tokens(answers) >= 0.95 * full * BLOCK
            assert device_tokens(answers) == 0
        assert await other.harness.metric("reprise_scheduler_load_failures_total") == 0
        other.check_nothing_leaked()


async def test_other_content_under_the_same_name_and_path_shares_no_key(
    prompts: list[list[int]], redis: ValkeyProcess, tmp_path: Path
) -> None:
    """The hashes of the blocks are the same: the keys tell them apart."""
    model = adapted_model(tmp_path)
    full = len(prompts) * NUM_BLOCKS
    async with adapted_engine(model, redis, model.modules("a")) as one:
        await ask(one, model, "a", prompts)
        await until(lambda: sum(map(len, keys(redis).values())) == full + len(prompts), 30)
    of_one = keys(redis)
    model.change_content()
    async with adapted_engine(model, redis, model.modules("a")) as other:
        answers = await other.ask(prompts, NUM_TOKENS, adapter="a")
        assert [answer.token_ids for answer in answers] == model.right("other", prompts)
        assert external_tokens(answers) == device_tokens(answers) == 0
        await until(lambda: sum(map(len, keys(redis).values())) == 2 * (full + len(prompts)), 30)
    both = keys(redis)
    assert len(both) == 2
    (digest,) = of_one
    assert both.pop(digest) == of_one[digest]
    (of_other,) = both.values()
    prompt_blocks = set(of_one[digest] & of_other)
    assert len(prompt_blocks) >= full, "the same hashes"


async def test_values_of_other_content_are_foreign_even_under_the_right_key(
    prompts: list[list[int]], redis: ValkeyProcess, tmp_path: Path
) -> None:
    """Somebody copies the blocks of the base model to an adapter's keys, say: recompute."""
    model = adapted_model(tmp_path)
    full = len(prompts) * NUM_BLOCKS
    async with adapted_engine(model, redis, model.modules("a")) as one:
        await ask(one, model, "a", prompts)
        await until(lambda: sum(map(len, keys(redis).values())) == full + len(prompts), 30)
        digest = one.adapter("a").digest
    model.change_content()
    async with adapted_engine(model, redis, model.modules("a")) as other:
        new = other.adapter("a").digest
        for name in redis.command("KEYS", f"*:{digest}:*"):
            redis.command("RENAME", name, name.replace(digest.encode(), new.encode()))
        answers = await other.ask(prompts, NUM_TOKENS, adapter="a")
        assert [answer.token_ids for answer in answers] == model.right("other", prompts)
        assert external_tokens(answers) == 0
        assert other.worker_metric("loads_failed_total", reason="foreign") > 0


async def test_a_reset_of_the_external_tier_reaches_adapters_blocks(
    adapted: Adapted, prompts: list[list[int]], redis: ValkeyProcess
) -> None:
    full = len(prompts) * NUM_BLOCKS
    async with adapted_engine(adapted, redis, adapted.modules("a")) as engine:
        for name in ("", "a"):
            await ask(engine, adapted, name, prompts)
        await until(lambda: sum(map(len, keys(redis).values())) == 2 * (full + len(prompts)), 30)
        await engine.forget()
        assert external_tokens(await ask(engine, adapted, "a", prompts)) == 0, "the host tier has them"
        answer = await engine.reset(external=True, running=True)
        assert answer.device
        assert answer.external
        for name in ("", "a"):
            answers = await ask(engine, adapted, name, prompts)
            assert all(
                (answer.usage.device_tokens, answer.usage.host_tokens, answer.usage.external_tokens)
                == (0, 0, 0)
                for answer in answers
            )


async def test_groups_of_a_hybrid_model_are_stored_by_adapter_too(
    prompts: list[list[int]], redis: ValkeyProcess, tmp_path: Path
) -> None:
    model = adapted_model(tmp_path, **HYBRID)
    async with adapted_engine(model, redis, model.modules("a", "b"), kv_role="kv_producer") as one:
        for name in NAMES:
            await ask(one, model, name, prompts)
        await until(lambda: not len(one.scheduler.connector.saves), 30)
        await until(lambda: not one.scheduler.connector.num_saves_in_flight, 30)
    async with adapted_engine(model, redis, model.modules("a", "b")) as other:
        for name in NAMES:
            answers = await ask(other, model, name, prompts)
            assert external_tokens(answers) == len(prompts) * NUM_BLOCKS * BLOCK, name


async def test_events_tell_the_adapter_in_every_tier(
    adapted: Adapted, prompts: list[list[int]], redis: ValkeyProcess
) -> None:
    publisher = f"tcp://127.0.0.1:{free_port()}"
    async with adapted_engine(adapted, redis, adapted.modules("a"), publisher_endpoint=publisher) as engine:
        events = watched(engine)
        for name in ("", "a"):
            await ask(engine, adapted, name, prompts)

        def told(medium: str, adapter: str | None) -> int:
            hashes = [
                event.block_hashes
                for event in events
                if isinstance(event, BlockStored) and (event.medium, event.lora_name) == (medium, adapter)
            ]
            return len(set().union(*hashes))

        for medium in ("GPU", "CPU", "EXTERNAL"):
            for adapter in (None, "a"):
                await until(lambda m=medium, a=adapter: told(m, a) == len(prompts) * (NUM_BLOCKS + 1), 30)
        ids = {event.lora_id for event in events if isinstance(event, BlockStored) and event.lora_name}
        assert ids == {1}


def watched(engine: RealEngine) -> list[KvEvent]:
    events: list[KvEvent] = []
    sender = engine.harness.app._events
    assert sender is not None
    send = sender.send
    sender.send = lambda batch: (events.extend(batch), send(batch))  # type: ignore[method-assign, func-returns-value]
    return events


async def test_a_worker_that_comes_back_with_other_content_finds_none_of_the_old_blocks(
    prompts: list[list[int]], tmp_path: Path
) -> None:
    """In the device's cache, whose hashes do not tell; what the store has is told apart by the keys."""
    model = adapted_model(tmp_path)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    publisher = f"tcp://127.0.0.1:{free_port()}"
    async with (
        running_store() as store,
        scheduler_beside(
            store_address(store), workers_endpoint=endpoint, publisher_endpoint=publisher
        ) as harness,
    ):
        async with (
            running_worker(
                model.folder, store_address(store), endpoint, lora_modules=model.modules("a", "b")
            ) as worker,
            attached(harness, worker) as engine,
        ):
            for name in NAMES:
                await ask(engine, model, name, prompts)
            assert device_tokens(await ask(engine, model, "a", prompts)) == 2 * NUM_BLOCKS * BLOCK
            await until(lambda: store.app.store.stats().host_blocks == 3 * 2 * (NUM_BLOCKS + 1), 30)
            events = watched(engine)
        model.change_content()
        sessions = await harness.metric("reprise_scheduler_worker_sessions_total")
        async with running_worker(
            model.folder, store_address(store), endpoint, lora_modules=model.modules("b", "a")
        ) as worker:
            async with asyncio.timeout(90):
                while await harness.metric("reprise_scheduler_worker_sessions_total") == sessions:
                    await asyncio.sleep(0.02)
            async with attached(harness, worker) as engine:
                assert AllBlocksCleared() in events
                answers = await engine.ask(prompts, NUM_TOKENS, adapter="a")
                assert [answer.token_ids for answer in answers] == model.right("other", prompts)
                usages = [answer.usage for answer in answers]
                assert all((u.device_tokens, u.host_tokens) == (0, 0) for u in usages)
                for name in ("", "b"):
                    answers = await ask(engine, model, name, prompts)
                    assert sum(answer.usage.host_tokens for answer in answers) == 2 * NUM_BLOCKS * BLOCK


async def test_what_the_worker_does_not_serve_is_refused_by_field_value_and_what_is_allowed(
    adapted: Adapted, prompts: list[list[int]]
) -> None:
    async with (
        running_store() as store,
        real_engine(
            adapted.folder, store_address(store), worker={"lora_modules": adapted.modules("a", "b")}
        ) as engine,
    ):
        path = str(adapted.paths["a"])
        refused = {
            "lora.name: 'c', must be one of 'a', 'b'": common_pb2.LoraAdapter(name="c", path=path),
            f"lora.path: '/c', must be {path!r} for the adapter 'a'": common_pb2.LoraAdapter(
                name="a", path="/c"
            ),
            "lora.int_id: 2, must be 1 for": common_pb2.LoraAdapter(name="a", path=path, int_id=2),
            "lora.digest: 'abcd', the content": common_pb2.LoraAdapter(name="a", path=path, digest="abcd"),
        }
        for number, lora in enumerate(refused.values()):
            engine.gateway.submit(f"refused{number}", prompts[0], lora=lora)
        await engine.gateway.ended(*(f"refused{number}" for number in range(len(refused))))
        for number, problem in enumerate(refused):
            finished = engine.gateway.requests[f"refused{number}"].finished
            assert finished is not None
            assert finished.error.kind == ("unavailable" if "digest" in problem else "invalid")
            assert finished.error.message.startswith(problem), finished.error.message
        info = await engine.harness.stub.GetInfo(pb.GetInfoRequest())
        assert [(one.name, one.path, one.int_id) for one in info.adapters] == [
            ("a", path, 1),
            ("b", str(adapted.paths["b"]), 2),
        ]
        assert len({one.digest for one in info.adapters}) == 2
