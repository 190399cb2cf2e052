"""An adapter's answers are those of the model with its weights merged in, whoever else is in the batch."""

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise_core.ids import BlockHash, GroupId
from reprise_core.steps import BlockLoad, BlockSave, StepPlan, pack_ids
from reprise_worker.attention import TorchAttention
from reprise_worker.lora_folder import read_adapter
from reprise_worker.model import PagedModel
from reprise_worker.model_folder import BadModel
from reprise_worker.runner import BadPlan
from support.lora_adapters import TARGETS, merged, write_adapter
from support.runner_driver import Driver
from support.tiny_models import HYBRID, paged, plain_greedy, small_config, small_model

NUM_TOKENS = 10


@dataclass(frozen=True)
class Adapted:
    model: PagedModel
    plain: list[PagedModel]
    """By adapter id: the base model, and one with each adapter's weights."""

    def right(self, adapter_id: int, prompt: list[int]) -> list[int]:
        return plain_greedy(self.plain[adapter_id], prompt, NUM_TOKENS)


def adapted(folder: Path, base: Any, *adapters: dict[str, Any]) -> Adapted:
    model = paged(copy.deepcopy(base))
    plain = [paged(copy.deepcopy(base))]
    for number, options in enumerate(adapters, 1):
        path = write_adapter(folder / str(number), base, **{"seed": number, **options})
        weights = read_adapter(path, max_rank=16)
        assert model.add_adapter(weights, TorchAttention(), block_size=4) == number
        plain.append(paged(merged(base, path)))
    return Adapted(model, plain)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """Of different ranks, scales and targets."""
    base = small_model(small_config("Llama"))
    rslora = {"rank": 9, "alpha": 6.0, "use_rslora": True, "targets": ("q_proj", "v_proj")}
    return adapted(tmp_path_factory.mktemp("adapters"), base, {}, rslora)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=length)


def test_adapters_and_the_base_model_differ_in_their_greedy_tokens(two: Adapted) -> None:
    """Else the other tests would prove nothing."""
    for seed in range(4):
        answers = [tuple(two.right(adapter_id, prompt_of(13, seed))) for adapter_id in range(3)]
        assert len(set(answers)) == 3


@pytest.mark.parametrize("adapter_id", [0, 1, 2])
def test_alone_with_a_chunked_prompt(two: Adapted, adapter_id: int) -> None:
    driver = Driver(two.model)
    driver.add(1, prompt_of(23), adapter_id=adapter_id)
    while driver.remaining(1) > 5:
        driver.step({1: 5})
    driver.finish([1], NUM_TOKENS)
    assert driver.output(1) == two.right(adapter_id, prompt_of(23))


def test_base_and_two_adapters_in_the_same_steps(two: Adapted) -> None:
    """Prefill, chunks and decode mixed; equal prompts for all three."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    prompts = {handle: prompt_of(3 + 5 * (handle // 3), seed=handle // 3) for handle in range(1, 13)}
    driver = Driver(two.model, num_blocks=120)
    waiting, running = list(prompts), list[int]()
    num_mixed = 0
    while waiting or running:
        if waiting and (not running or chance.random() < 0.5):
            handle = waiting.pop(0)
            driver.add(handle, prompts[handle], adapter_id=handle % 3)
            running.append(handle)
        schedule = {handle: min(driver.remaining(handle), chance.choice([1, 4, 9])) for handle in running}
        num_mixed += len({handle % 3 for handle in running}) == 3
        driver.step(schedule)
        for handle in [handle for handle in running if len(driver.output(handle)) >= NUM_TOKENS]:
            driver.remove(handle)
            running.remove(handle)
            assert driver.output(handle)[:NUM_TOKENS] == two.right(handle % 3, prompts[handle]), handle
    assert num_mixed


def test_a_step_without_adapters_runs_the_model_as_it_is(two: Adapted) -> None:
    linears = [module for module in two.model.hf.modules() if isinstance(module, torch.nn.Linear)]
    driver = Driver(two.model)
    driver.add(1, prompt_of(9), adapter_id=1)
    driver.step({1: 9})
    assert not any("forward" in vars(linear) for linear in linears)
    assert not any(linear._forward_hooks or linear._forward_pre_hooks for linear in linears)


@pytest.mark.parametrize(
    ("kind", "changes", "targets"),
    [
        ("Qwen2", {}, TARGETS),
        ("Phi3", {}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("GPTNeoX", {}, ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
        (HYBRID["kind"], {name: value for name, value in HYBRID.items() if name != "kind"}, TARGETS),
    ],
)
def test_other_architectures(tmp_path: Path, kind: str, changes: dict[str, Any], targets: tuple[str]) -> None:
    base = small_model(small_config(kind, **changes))
    one = adapted(tmp_path, base, {"targets": targets})
    driver = Driver(one.model)
    for handle in (1, 2, 3):
        driver.add(handle, prompt_of(11), adapter_id=handle % 2)
    driver.finish([1, 2, 3], NUM_TOKENS)
    for handle in (1, 2, 3):
        assert driver.output(handle)[:NUM_TOKENS] == one.right(handle % 2, prompt_of(11))
    assert driver.output(1)[:NUM_TOKENS] != driver.output(2)[:NUM_TOKENS]


def test_layers_that_are_not_given_every_token_are_refused(tmp_path: Path) -> None:
    """The model's head sees only the rows that a token is drawn from."""
    base = small_model(small_config("Llama"))
    with pytest.raises(
        BadModel, match="1 is not supported: a layer that it targets is not given every token"
    ):
        adapted(tmp_path, base, {"targets": ("lm_head",)})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": 64}, r"layer '\S+' has 48 inputs and 64 outputs, the model's has 48 and 32"),
        ({"num_hidden_layers": 4}, r"layer 'model\.layers\.3\.\S+': the model has no such layer"),
    ],
)
def test_an_adapter_of_another_model_is_refused(tmp_path: Path, change: dict[str, int], problem: str) -> None:
    other = small_model(small_config("Llama", **change))
    model = paged(small_model(small_config("Llama")))
    weights = read_adapter(write_adapter(tmp_path / "a", other, seed=1), max_rank=16)
    with pytest.raises(BadModel, match=problem):
        model.add_adapter(weights, TorchAttention(), block_size=4)
    assert model.num_adapters == 0


@pytest.mark.parametrize("adapter_id", [-1, 3])
def test_plans_that_name_another_adapter_are_refused(two: Adapted, adapter_id: int) -> None:
    driver = Driver(two.model)
    driver.add(1, [3, 4, 5], adapter_id=adapter_id)
    with pytest.raises(BadPlan, match=f"adapter {adapter_id}, this worker has 2"):
        driver.step({1: 3})
    save = BlockSave(GroupId(0), 1, BlockHash(bytes(32)), 0, adapter_id)
    load = BlockLoad(1, 0, pack_ids([1]), (BlockHash(bytes(32)),), 0, adapter_id)
    for plan in (StepPlan(1, saves=(save,)), StepPlan(1, loads=(load,))):
        with pytest.raises(BadPlan, match=f"adapter {adapter_id}"):
            Driver(two.model).runner.execute(plan)
