"""Small decoders with random weights, of many architectures, for tests that need a real model."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from reprise_worker import attention
from reprise_worker.model import PagedModel

CPU = torch.device("cpu")
_SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large enough that greedy choices do not hang on rounding.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def small_config(kind: str, **changes: Any) -> PretrainedConfig:
    """A config class by its name without `Config`, cut down to run in milliseconds."""
    config_class = getattr(transformers, f"{kind}Config")
    config: PretrainedConfig = config_class(**{**_SMALL, **changes})
    return config


def small_model(config: PretrainedConfig, *, seed: int = 0) -> Any:
    """The plain transformers model, in float32, as `AutoModelForCausalLM` makes it."""
    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM.from_config
    return make(config, dtype=torch.float32).eval()


def paged(model: Any, device: torch.device = CPU) -> PagedModel:
    """`model` with our attention; it can still generate by itself through `plain_greedy`."""
    attention.register()
    model.set_attn_implementation(attention.IMPLEMENTATION)
    return PagedModel(model, device)


@torch.inference_mode()
def plain_greedy(model: PagedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers' own generate gives, by its eager attention."""
    model.hf.set_attn_implementation("eager")
    try:
        ids = torch.tensor([prompt], device=model.device)
        output = model.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            # generate bans the end-of-sequence token until min_new_tokens; without one it bans none.
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens
    finally:
        model.hf.set_attn_implementation(attention.IMPLEMENTATION)


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 9},
    "Mixtral": {"num_local_experts": 4},
    "Gemma2": {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16},
    "Gemma3Text": {
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
    "Phi3": {},
    "Olmo2": {},
    "Cohere2": {"sliding_window": 9},
    "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
    "GptOss": {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
"""Kinds that are supported, with what makes them small or special."""
HYBRID: dict[str, Any] = {
    "kind": "Qwen2",
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
}
"""Layers with a window of 9 tokens and full ones, in turns."""


def write_model_folder(folder: Path, *, kind: str = "Llama", seed: int = 0, **changes: Any) -> Path:
    """A folder that a worker can be started on: a small model and a tokenizer of its own ids."""
    from tokenizers import Tokenizer, models

    small_model(small_config(kind, **changes), seed=seed).save_pretrained(folder)
    vocabulary = {f"<{number}>": number for number in range(97)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder
