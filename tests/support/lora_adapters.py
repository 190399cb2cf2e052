"""LoRA adapters with random weights, in PEFT's format, and plain models with their weights merged in."""

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: torch.nn.Module,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    size: float = 0.2,
    targets: Sequence[str] = TARGETS,
    **config: Any,
) -> Path:
    """For the linear layers of `model` that the targets name; `size` is large enough to change greedy tokens
    of a small model."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.split(".")[-1] in targets:
            prefix = f"base_model.model.{name}"
            for part, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensors[f"{prefix}.lora_{part}.weight"] = size * torch.randn(shape, generator=generator)
    assert tensors
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": "somewhere",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "target_modules": list(targets),
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """A copy of the plain model with W + scale * B @ A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config["use_rslora"] else rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    other = copy.deepcopy(model)
    for name, a in tensors.items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name)
        if found:
            layer = other.get_submodule(found[1])
            b = tensors[name.replace("lora_A", "lora_B")]
            with torch.no_grad():
                layer.weight += scale * (b @ a)
    return other
