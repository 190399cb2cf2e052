"""Equal fingerprints mean interchangeable blocks; the digest of the weights is computed once."""

import json
import shutil
from pathlib import Path

import pytest

from reprise_worker import fingerprint
from reprise_worker.fingerprint import model_fingerprint, weights_digest
from reprise_worker.layer_groups import LayerGroup
from support.tiny_models import write_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


def of(folder: Path, **changes: object) -> str:
    standard = {"dtype": "float32", "block_size": 16, "architecture": "LlamaForCausalLM", "cache_dir": None}
    return model_fingerprint(folder, **{**standard, **changes})  # type: ignore[arg-type]


def test_a_copy_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    first = of(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / ".reprise-weights-digest.json").unlink()
    assert of(copy) == first
    assert len(bytes.fromhex(first)) == 16


def test_everything_that_changes_blocks_changes_it(folder: Path, tmp_path: Path) -> None:
    other = write_model_folder(tmp_path / "other", seed=1)
    config = json.loads((folder / "config.json").read_text())
    seen = {of(folder), of(folder, dtype="bfloat16"), of(folder, block_size=32), of(other)}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5.0}
    (folder / "config.json").write_text(json.dumps(config))
    seen |= {of(folder), of(folder, offload_dtype="fp8_e4m3")}
    groups = (LayerGroup((1,)), LayerGroup((0,), 9))
    assert of(folder, groups=(LayerGroup((0, 1)),)) in seen, "one group is as none were named"
    seen.add(of(folder, groups=groups))
    assert len(seen) == 7


def test_who_wrote_the_config_does_not_matter(folder: Path) -> None:
    first = of(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "0.0"}))
    assert of(folder) == first


def test_the_digest_is_kept_until_the_files_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[Path]] = []
    compute = fingerprint._digest

    def counting(files: list[Path]) -> str:
        read.append(files)
        return compute(files)

    monkeypatch.setattr(fingerprint, "_digest", counting)
    first = weights_digest(folder, None)
    assert weights_digest(folder, None) == first
    assert len(read) == 1
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert weights_digest(folder, None) != first
    assert len(read) == 2


def test_a_read_only_folder_keeps_it_elsewhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = fingerprint._write
    monkeypatch.setattr(
        fingerprint, "_write", lambda place, content: place.parent != folder and write(place, content)
    )
    elsewhere = tmp_path / "digests"
    first = weights_digest(folder, elsewhere)
    assert len(list(elsewhere.iterdir())) == 1
    monkeypatch.setattr(fingerprint, "_digest", lambda files: pytest.fail("read again"))
    assert weights_digest(folder, elsewhere) == first


def test_a_damaged_note_is_ignored(folder: Path) -> None:
    first = weights_digest(folder, None)
    (folder / ".reprise-weights-digest.json").write_text("[")
    assert weights_digest(folder, None) == first
