"""Many architectures run packed and paged with the logits they have alone; others are refused."""

import random
from typing import Any

import pytest
import torch

from reprise_worker.attention import TorchAttention
from reprise_worker.model_folder import BadModel
from support.runner_driver import Driver
from support.tiny_models import ARCHITECTURES, paged, plain_greedy, small_config, small_model

# What each lacks is in the message: no attention interface, layers of other kinds.
REFUSED: dict[str, dict[str, Any]] = {
    "Bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "Mpt": {"d_model": 32, "n_layers": 3, "n_heads": 4},
    "Qwen3Next": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "Mamba": {"num_hidden_layers": 3},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_packed_requests_keep_their_own_tokens(kind: str) -> None:
    model = paged(small_model(small_config(kind, **ARCHITECTURES[kind])))
    model.check(TorchAttention(), block_size=4)
    prompts = {handle: random.Random(handle).choices(range(3, 97), k=7 * handle) for handle in (1, 2, 3)}
    driver = Driver(model)
    for handle, prompt in prompts.items():
        driver.add(handle, prompt)
    driver.step({1: 7, 2: 9, 3: 16})  # the second and third in chunks
    driver.finish([1, 2, 3], 8)
    for handle, prompt in prompts.items():
        assert driver.output(handle) == plain_greedy(model, prompt, 8), handle


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_that_cannot_be_served_is_refused_by_name(kind: str) -> None:
    model = small_model(small_config(kind, **REFUSED[kind]))
    with pytest.raises(BadModel, match=f"architecture {type(model).__name__} is not supported: "):
        paged(model).check(TorchAttention(), block_size=4)


def test_positions_that_depend_on_the_longest_request_are_not_served() -> None:
    """LongRoPE picks one set of frequencies for a whole batch; below the limit it is always the same."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    model = paged(
        small_model(small_config("Phi3", original_max_position_embeddings=64, rope_parameters=rope))
    )
    assert model.max_model_len == 64
    assert paged(small_model(small_config("Phi3"))).max_model_len == 256


def test_a_model_whose_requests_mix_is_refused() -> None:
    """A layer that looks across the flattened batch: the dry run sees it in the logits."""
    model = small_model(small_config("Llama"))
    norm = model.model.norm

    class Mixing(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = norm(hidden + hidden.mean(dim=1, keepdim=True))
            return mixed

    model.model.norm = Mixing()
    with pytest.raises(BadModel, match="change each other's logits"):
        paged(model).check(TorchAttention(), block_size=4)
