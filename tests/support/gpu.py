"""The device of tests/gpu. `REPRISE_TEST_DEVICE=cpu` runs them without one, to test the tests themselves."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from reprise_worker import attention
from reprise_worker.model import PagedModel
from support.reference import TIE_TOLERANCE

DEVICE = torch.device(os.environ.get("REPRISE_TEST_DEVICE", "cuda"), 0)
ON_CUDA = DEVICE.type == "cuda"
needs_device = pytest.mark.skipif(ON_CUDA and not torch.cuda.is_available(), reason="no CUDA device")


def random_llama(*, dtype: torch.dtype, seed: int = 0, **changes: Any) -> Any:
    """A plain transformers Llama with random weights, made on the device; small where that is a CPU."""
    small = {} if ON_CUDA else {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    config = LlamaConfig(
        **{
            "vocab_size": 32_000,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            # Large enough that greedy choices do not hang on rounding.
            "initializer_range": 0.1,
            "eos_token_id": None,
            **small,
            **changes,
        }
    )
    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM.from_config
    with DEVICE:
        return make(config, dtype=dtype).eval()


@torch.inference_mode()
def plain_logits(model: PagedModel, tokens: Sequence[int], how: str = "eager") -> torch.Tensor:
    """(len(tokens), vocab), in float32, by an attention of transformers' own, without a cache."""
    model.hf.set_attn_implementation(how)
    try:
        ids = torch.tensor([list(tokens)], device=model.device)
        logits: torch.Tensor = model.hf(input_ids=ids, use_cache=False).logits[0]
        return logits.float()
    finally:
        model.hf.set_attn_implementation(attention.IMPLEMENTATION)


def check_greedy(model: PagedModel, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Every token is the best after what stands before it, or ties with the best."""
    logits = plain_logits(model, [*prompt, *output[:-1]])[len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(list(output), device=logits.device)[:, None])[:, 0]
    gaps = logits.max(dim=-1).values - chosen
    assert float(gaps.max()) < TIE_TOLERANCE, f"token {int(gaps.argmax())} is {float(gaps.max()):.4f} below"
