"""Greedy decoding by step plans on the device gives the tokens of transformers' generate there."""

import random
from typing import Any

import pytest
import torch

from reprise_worker.attention import TorchAttention
from reprise_worker.batch import ScheduledTokens, make_batch
from reprise_worker.kv_cache import KvCache
from reprise_worker.layer_groups import group_layers
from reprise_worker.model import _TOLERANCE, PagedModel
from reprise_worker.request_state import IdList, RequestState
from support.gpu import DEVICE, ON_CUDA, check_greedy, needs_device, plain_logits, random_llama
from support.runner_driver import Driver, run_mixed_batches
from support.tiny_models import ARCHITECTURES, HYBRID, paged, plain_greedy, small_config, small_model

pytestmark = needs_device
NUM_TOKENS = 12
MANY: dict[str, dict[str, Any]] = {**ARCHITECTURES, "Qwen2": HYBRID}
# Experts are chosen by rounding where weights are random and have 8 bits.
DENSE = [kind for kind in MANY if kind not in ("Mixtral", "GptOss", "DeepseekV3")]


def tiny(kind: str, dtype: torch.dtype = torch.float32) -> PagedModel:
    changes = {key: value for key, value in MANY[kind].items() if key != "kind"}
    return paged(small_model(small_config(kind, **changes)).to(dtype), DEVICE)


def prompt_of(length: int, seed: int, vocab_size: int = 97) -> list[int]:
    return random.Random(seed).choices(range(3, vocab_size), k=length)


@pytest.mark.parametrize("kind", MANY)
def test_mixed_batches_of_many_architectures(kind: str) -> None:
    model = tiny(kind)
    prompts = {handle: prompt_of(3 + 5 * handle, handle) for handle in range(1, 7)}
    outputs = run_mixed_batches(Driver(model), prompts, chunks=[1, 4, 9], num_tokens=NUM_TOKENS)
    for handle, prompt in prompts.items():
        assert outputs[handle] == plain_greedy(model, prompt, NUM_TOKENS), handle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MANY)
def test_the_check_at_start_passes(kind: str, dtype: torch.dtype) -> None:
    if kind in DENSE or dtype is torch.float32:
        tiny(kind, dtype).check(TorchAttention(), block_size=16)


@pytest.fixture(scope="module")
def llama() -> PagedModel:
    return paged(random_llama(dtype=torch.float32), DEVICE)


def long_prompt(length: int, seed: int) -> list[int]:
    return prompt_of(length, seed, 32_000)


def test_float32_products_are_not_rounded_to_tf32(llama: PagedModel) -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_larger_model_in_mixed_batches(llama: PagedModel) -> None:
    prompts = {handle: long_prompt(40 * handle + 3, handle) for handle in range(1, 9)}
    driver = Driver(llama, num_blocks=400, block_size=16)
    outputs = run_mixed_batches(driver, prompts, chunks=[1, 33, 128], num_tokens=NUM_TOKENS)
    for handle, prompt in prompts.items():
        if outputs[handle] != plain_greedy(llama, prompt, NUM_TOKENS):
            check_greedy(llama, prompt, outputs[handle])


def test_hits_and_preemption(llama: PagedModel) -> None:
    driver = Driver(llama, num_blocks=400, block_size=16)
    shared = long_prompt(256, 1)
    first, second = shared + long_prompt(50, 2), shared + long_prompt(70, 3)
    driver.add(1, first)
    driver.step({1: 100})
    driver.finish([1], NUM_TOKENS)
    driver.add(2, second, shared_blocks=driver.blocks[1][:16])
    driver.finish([2], 5)
    driver.remove(2)
    driver.add(3, driver.tokens[2], num_output=5)
    driver.finish([3], NUM_TOKENS)
    check_greedy(llama, first, driver.output(1))
    check_greedy(llama, second, driver.output(3))


def test_a_hit_on_blocks_that_the_same_step_fills(llama: PagedModel) -> None:
    """Every layer writes all K and V before any is read."""
    driver = Driver(llama, num_blocks=100, block_size=16)
    shared = long_prompt(64, 1)
    first, second = shared + long_prompt(5, 2), shared + long_prompt(6, 3)
    driver.add(1, first)
    driver.add(2, second, shared_blocks=driver.free[:4])
    driver.step({1: len(first), 2: len(second) - 64})
    driver.finish([1, 2], NUM_TOKENS)
    check_greedy(llama, first, driver.output(1))
    check_greedy(llama, second, driver.output(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_after_chunks_and_decodes(dtype: torch.dtype) -> None:
    """Within what the worker allows at its start, over longer contexts than there."""
    model = paged(random_llama(dtype=dtype, initializer_range=0.02), DEVICE)
    lengths, block_size = (700, 513, 90), 16
    kv = KvCache(model.layers, num_blocks=120, block_size=block_size, dtype=dtype, device=DEVICE)
    sequences = [long_prompt(length, length) for length in lengths]
    free = iter(random.Random(1).sample(range(1, 120), 119))
    states = [
        RequestState.scratch(
            tokens=IdList(tokens), blocks=IdList(next(free) for _ in range(-(-len(tokens) // block_size)))
        )
        for tokens in sequences
    ]
    expected = torch.cat([plain_logits(model, tokens)[-8:] for tokens in sequences])
    rows: list[list[torch.Tensor]] = [[], [], []]
    for first in range(0, 700, 250):  # chunks, all but the last 8 tokens
        items = [
            ScheduledTokens(state, first, min(250, len(state.tokens) - 8 - first), False)
            for state in states
            if len(state.tokens) - 8 > first
        ]
        model.forward(make_batch(items, block_size=block_size, device=DEVICE), kv, TorchAttention())
    for back in range(8, 0, -1):  # one token of each
        items = [ScheduledTokens(state, len(state.tokens) - back, 1, True) for state in states]
        batch = make_batch(items, block_size=block_size, device=DEVICE)
        logits = model.forward(batch, kv, TorchAttention())
        for own, row in zip(rows, logits, strict=True):
            own.append(row.float())
    actual = torch.cat([torch.stack(own) for own in rows])
    worst = float((actual - expected).abs().max() / expected.abs().max())
    print(f"{dtype}: logits differ by {worst:.2e} of the largest")
    assert worst < _TOLERANCE[dtype]


def test_groups_with_windows_read_only_what_they_keep() -> None:
    """Blocks that left the window are the null block in a group's table, as the scheduler leaves them."""
    changes = {key: value for key, value in HYBRID.items() if key != "kind"}
    model = paged(small_model(small_config(HYBRID["kind"], **changes)), DEVICE)
    groups = group_layers(model.layers, model.windows)
    assert [group.window_tokens for group in groups] == [None, 9]
    kv = KvCache(model.layers, groups=groups, num_blocks=64, block_size=4, dtype=torch.float32, device=DEVICE)
    tokens = prompt_of(61, 4)
    state = RequestState.scratch(tokens=IdList(tokens), blocks=IdList(range(1, 17)))
    state.tables.append(IdList(range(20, 36)))
    actual = []
    for start, num_new in ((0, 30), (30, 22), *((52 + index, 1) for index in range(9))):
        left = max(0, start - 9 + 1) // 4
        state.tables[1].view[:left] = 0
        batch = make_batch([ScheduledTokens(state, start, num_new, True)], block_size=4, device=DEVICE)
        actual.append(model.forward(batch, kv, TorchAttention())[0])
        for view in (*kv.keys, *kv.values):
            assert not view[0].any()  # nothing goes into the null block
    expected = plain_logits(model, tokens)[[29, *range(51, 61)]]
    assert torch.allclose(torch.stack(actual).float(), expected, atol=2e-3 * float(expected.abs().max()))


@pytest.mark.skipif(not ON_CUDA, reason="large")
def test_blocks_far_into_a_large_pool(llama: PagedModel) -> None:
    """Element offsets beyond 2^31."""
    per_block = 2 * 16 * 4 * 16 * 64
    num_blocks = (3 << 31) // per_block
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("the device has less than 30 GiB free")
    kv = KvCache(llama.layers, num_blocks=num_blocks, block_size=16, dtype=torch.float32, device=DEVICE)
    tokens = long_prompt(100, 8)
    state = RequestState.scratch(
        tokens=IdList(tokens), blocks=IdList(num_blocks - 1 - 3 * index for index in range(7))
    )
    for start, num_new in ((0, 60), (60, 39), (99, 1)):
        batch = make_batch([ScheduledTokens(state, start, num_new, True)], block_size=16, device=DEVICE)
        logits = llama.forward(batch, kv, TorchAttention())
    kv.copy_block(num_blocks - 1, 1)
    assert torch.equal(kv.keys[15][1], kv.keys[15][num_blocks - 1])
    assert kv.keys[15][1].any()
    expected = plain_logits(llama, tokens)[-1]
    assert float((logits[0] - expected).abs().max() / expected.abs().max()) < _TOLERANCE[torch.float32]
