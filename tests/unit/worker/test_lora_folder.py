"""Adapter folders: what is served is what both files say, and what cannot be is refused by file and field."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reprise_worker.lora_folder import CONFIG, WEIGHTS, LoraWeights, read_adapter
from reprise_worker.model_folder import BadModel
from support.lora_adapters import TARGETS, write_adapter
from support.tiny_models import small_config, small_model


@pytest.fixture(scope="module")
def base() -> Any:
    return small_model(small_config("Llama"))


@pytest.fixture
def folder(tmp_path: Path, base: Any) -> Path:
    return write_adapter(tmp_path / "adapter", base, seed=3)


def read(folder: Path, max_rank: int = 16) -> LoraWeights:
    return read_adapter(folder, max_rank=max_rank)


def set_config(folder: Path, **changes: Any) -> None:
    """`...` as a value takes the field away."""
    config = json.loads((folder / CONFIG).read_text())
    config |= changes
    kept = {name: value for name, value in config.items() if value is not ...}
    (folder / CONFIG).write_text(json.dumps(kept))


def set_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(folder / WEIGHTS), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / WEIGHTS)


def test_every_targeted_layer_has_its_pair(folder: Path) -> None:
    weights = read(folder)
    assert (weights.rank, weights.scale) == (4, 2.0)
    assert len(weights.pairs) == 3 * len(TARGETS)
    pair = weights.pairs["model.layers.1.mlp.down_proj"]
    assert (tuple(pair.a.shape), tuple(pair.b.shape)) == ((4, 48), (32, 4))


def test_rslora_scales_by_the_root_of_the_rank(folder: Path) -> None:
    set_config(folder, use_rslora=True)
    assert read(folder).scale == 4.0


@pytest.mark.parametrize("targets", ["all-linear", ".*_proj", [*TARGETS[:-1], "mlp.down_proj"]])
def test_targets_may_be_a_text_or_ends_of_names(folder: Path, targets: object) -> None:
    set_config(folder, target_modules=targets)
    assert len(read(folder).pairs) == 3 * len(TARGETS)


def test_the_digest_is_of_the_content_wherever_it_lies(folder: Path, tmp_path: Path, base: Any) -> None:
    copy = write_adapter(tmp_path / "copy", base, seed=3)
    assert read(copy).digest == read(folder).digest
    assert len(read(folder).digest) == 32
    digests = {read(folder).digest}
    set_config(folder, lora_alpha=9)
    digests.add(read(folder).digest)
    digests.add(read(write_adapter(tmp_path / "other", base, seed=4)).digest)
    assert len(digests) == 3


def test_what_changes_nothing_is_passed_over(folder: Path) -> None:
    set_config(folder, lora_dropout=0.5, peft_version="99", revision=None, runtime_config={"x": 1})
    read(folder)


def test_defaults_may_be_left_out(folder: Path) -> None:
    off = ("bias", "modules_to_save", "use_dora", "use_rslora", "init_lora_weights", "rank_pattern")
    set_config(folder, **dict.fromkeys(off, ...))
    assert read(folder).scale == 2.0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type: 'IA3', must be 'LORA'"),
        ({"peft_type": ...}, "peft_type: None, must be 'LORA'"),
        ({"r": 0}, "r: 0, must be a whole number of at least 1"),
        ({"r": "4"}, "r: '4', must be a whole number"),
        ({"r": True}, "r: True, must be a whole number"),
        ({"r": ...}, "r: None, must be a whole number"),
        ({"lora_alpha": "8"}, "lora_alpha: '8', must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha: nan, must be a number"),
        ({"lora_alpha": ...}, "lora_alpha: None, must be a number"),
        ({"use_rslora": "yes"}, "use_rslora: 'yes', must be true or false"),
        ({"bias": "all"}, "bias: 'all', must be 'none'"),
        ({"use_dora": True}, "use_dora: True, must be off"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\], must be off"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern: {'q_proj': 8}, must be off"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern: {'q_proj': 8}, must be off"),
        ({"layer_replication": [[0, 1]]}, "layer_replication: .* must be off"),
        ({"lora_bias": True}, "lora_bias: True, must be off"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: .* must be off"),
        ({"target_parameters": ["experts.w"]}, "target_parameters: .* must be off"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens: .* must be off"),
        ({"use_qalora": True}, "use_qalora: True, must be off"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa', must be one of"),
        ({"target_modules": []}, r"target_modules: \[\], must be names of layers"),
        ({"target_modules": None}, "target_modules: None, must be names of layers"),
        (
            {"target_modules": [*TARGETS, "lm_head"]},
            "target_modules: 'lm_head', must be a layer with tensors",
        ),
        ({"target_modules": [*TARGETS[1:]]}, "layer '.*q_proj' is none of adapter_config.json's"),
        ({"target_modules": [*TARGETS[:-1], "own_proj"]}, "target_modules: 'own_proj', must be a layer with"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named_with_its_file(
    folder: Path, changes: dict[str, Any], problem: str
) -> None:
    set_config(folder, **changes)
    with pytest.raises(BadModel, match=f"adapter file {folder}/adapter_.*{problem}"):
        read(folder)


def test_a_rank_above_the_limit_is_refused(folder: Path) -> None:
    assert read(folder, max_rank=4).rank == 4
    with pytest.raises(
        BadModel, match=r"adapter_config\.json: r: 4, must be at most max_lora_rank, which is 3"
    ):
        read(folder, max_rank=3)


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({f"{LAYER}.lora_B.weight": None}, "layer 'model.layers.0.self_attn.q_proj' has lora_A alone"),
        ({f"{LAYER}.lora_A.weight": torch.ones(3, 32)}, "lora_A of layer .* has rank 3, .* says r = 4"),
        ({f"{LAYER}.lora_B.weight": torch.ones(32, 5)}, "lora_B of layer .* has rank 5, .* says r = 4"),
        ({f"{LAYER}.lora_A.weight": torch.ones(4)}, "tensor .* is no matrix of floating-point numbers"),
        ({f"{LAYER}.lora_A.weight": torch.ones(4, 32, dtype=torch.int8)}, "tensor .* is no matrix"),
        ({f"{LAYER}.lora_magnitude_vector": torch.ones(4)}, "tensor '.*vector' is not supported"),
        ({"model.norm.weight": torch.ones(32)}, "tensor 'model.norm.weight' is not supported"),
        ({"base_model.model.lm_head.weight": torch.ones(9, 32)}, "tensor '.*' is not supported; allowed are"),
    ],
)
def test_a_tensor_that_cannot_be_honoured_is_named_with_its_file(
    folder: Path, changes: dict[str, torch.Tensor | None], problem: str
) -> None:
    set_tensors(folder, changes)
    with pytest.raises(BadModel, match=rf"adapter file {folder}/adapter_model\.safetensors: {problem}"):
        read(folder)


def test_files_that_are_missing_or_damaged(folder: Path) -> None:
    with pytest.raises(BadModel, match=r"adapter folder .*nowhere does not exist"):
        read(folder / "nowhere")
    weights, config = (folder / WEIGHTS).read_bytes(), (folder / CONFIG).read_bytes()
    for damaged in (weights[:-4], weights[:9], b"", b"\xff" * 64):
        (folder / WEIGHTS).write_bytes(damaged)
        with pytest.raises(BadModel, match=r"adapter_model\.safetensors is damaged"):
            read(folder)
    save_file({}, folder / WEIGHTS)
    with pytest.raises(BadModel, match="has no tensors"):
        read(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(BadModel, match=r"adapter .* has no adapter_model\.safetensors"):
        read(folder)
    (folder / WEIGHTS).write_bytes(weights)
    for damaged, problem in ((config[:-3], "cannot be read as JSON"), (b"[]", "is not a JSON object")):
        (folder / CONFIG).write_bytes(damaged)
        with pytest.raises(BadModel, match=problem):
            read(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(BadModel, match=r"adapter .* has no adapter_config\.json"):
        read(folder)
