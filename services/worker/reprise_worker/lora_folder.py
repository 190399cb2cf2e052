"""A LoRA adapter on disk, in PEFT's format: read once, checked, and named by its content.

Linear layers are adapted, W + scale * B @ A with one rank for all. What would make more of it is a `BadModel`
that names file and field, because an adapter that is served in part gives wrong answers.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from reprise_worker.model_folder import BadModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Of adapter_config.json: what adds to, or changes, what the two matrices of a layer say.
_MUST_BE_OFF = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
)
# Ways to begin training that leave the model's own weights as they are.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What a linear layer adds: `scale * b @ (a @ x)`."""

    a: torch.Tensor  # (rank, in_features)
    b: torch.Tensor  # (out_features, rank)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Of one adapter, as read."""

    folder: Path
    digest: str
    """32 hexadecimal digits: of what the two files hold."""
    rank: int
    scale: float
    pairs: Mapping[str, LoraPair]
    """By the layer's name in the model."""


def read_adapter(folder: Path, *, max_rank: int) -> LoraWeights:
    """Raises BadModel. What is digested is what is served, whatever becomes of the files."""
    if not folder.is_dir():
        raise BadModel(f"adapter folder {folder} does not exist")
    config_bytes, weights_bytes = (_read(folder / name) for name in (CONFIG, WEIGHTS))
    config = _config(folder / CONFIG, config_bytes)
    rank = _rank(folder / CONFIG, config, max_rank)
    pairs = _pairs(folder / WEIGHTS, weights_bytes, rank)
    _check_targets(folder, config.get("target_modules"), pairs)
    return LoraWeights(
        folder, _digest(config_bytes, weights_bytes), rank, _scale(folder / CONFIG, config, rank), pairs
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise BadModel(f"adapter {path.parent} has no {path.name}") from error
    except OSError as error:
        raise BadModel(f"adapter file {path} cannot be read: {error}") from error


def _digest(*contents: bytes) -> str:
    total = hashlib.blake2b(digest_size=16)
    for content in contents:
        total.update(hashlib.blake2b(content, digest_size=32).digest())
    return total.hexdigest()


def _config(path: Path, content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except ValueError as error:
        raise BadModel(f"adapter file {path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadModel(f"adapter file {path} is not a JSON object")
    if config.get("peft_type") != "LORA":
        raise _bad(path, "peft_type", config.get("peft_type"), "'LORA'")
    if config.get("bias", "none") != "none":
        raise _bad(path, "bias", config["bias"], "'none'")
    for name in _MUST_BE_OFF:
        if config.get(name):
            raise _bad(path, name, config[name], "off: adapters of that kind are not supported")
    if config.get("init_lora_weights") not in _INITS:
        raise _bad(
            path,
            "init_lora_weights",
            config["init_lora_weights"],
            f"one of {', '.join(map(repr, _INITS))}: others change the model's own weights",
        )
    return config


def _rank(path: Path, config: Mapping[str, Any], max_rank: int) -> int:
    rank = config.get("r")
    if type(rank) is not int or rank < 1:
        raise _bad(path, "r", rank, "a whole number of at least 1")
    if rank > max_rank:
        raise _bad(path, "r", rank, f"at most max_lora_rank, which is {max_rank}")
    return rank


def _scale(path: Path, config: Mapping[str, Any], rank: int) -> float:
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise _bad(path, "lora_alpha", alpha, "a number")
    use_rslora = config.get("use_rslora") or False
    if not isinstance(use_rslora, bool):
        raise _bad(path, "use_rslora", use_rslora, "true or false")
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def _pairs(path: Path, content: bytes, rank: int) -> dict[str, LoraPair]:
    try:
        tensors = load_tensors(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadModel(f"adapter file {path} is damaged: {error}") from error
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise BadModel(
                f"adapter file {path}: tensor {name!r} is not supported; allowed are"
                " base_model.model.LAYER.lora_A.weight and .lora_B.weight"
            )
        if tensor.ndim != 2 or not tensor.is_floating_point():
            raise BadModel(f"adapter file {path}: tensor {name!r} is no matrix of floating-point numbers")
        parts.setdefault(found[1], {})[found[2]] = tensor
    if not parts:
        raise BadModel(f"adapter file {path} has no tensors")
    for layer, pair in parts.items():
        if len(pair) != 2:
            raise BadModel(f"adapter file {path}: layer {layer!r} has lora_{next(iter(pair))} alone")
        for part, its_rank in (("A", pair["A"].shape[0]), ("B", pair["B"].shape[1])):
            if its_rank != rank:
                raise BadModel(
                    f"adapter file {path}: lora_{part} of layer {layer!r} has rank {its_rank}, {CONFIG} says"
                    f" r = {rank}"
                )
    return {layer: LoraPair(pair["A"], pair["B"]) for layer, pair in parts.items()}


def _check_targets(folder: Path, targets: object, pairs: Mapping[str, LoraPair]) -> None:
    """Both files name the same layers; a text stands for what it matches, which the tensors tell."""
    if isinstance(targets, str) and targets:
        return
    if not isinstance(targets, list) or not targets or not all(isinstance(one, str) for one in targets):
        raise _bad(folder / CONFIG, "target_modules", targets, "names of layers")
    for target in targets:
        if not any(_is(layer, target) for layer in pairs):
            raise _bad(folder / CONFIG, "target_modules", target, f"a layer with tensors in {WEIGHTS}")
    for layer in pairs:
        if not any(_is(layer, target) for target in targets):
            raise BadModel(
                f"adapter file {folder / WEIGHTS}: layer {layer!r} is none of {CONFIG}'s target_modules"
            )


def _is(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def _bad(path: Path, field: str, value: object, allowed: str) -> BadModel:
    return BadModel(f"adapter file {path}: {field}: {value!r:.80}, must be {allowed}")
