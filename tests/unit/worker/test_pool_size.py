"""How many blocks a budget holds, and what settings are refused."""

from pathlib import Path

import pytest

from reprise_core.errors import InvalidInput
from reprise_runtime.settings import load_settings
from reprise_worker import memory
from reprise_worker.app import _device, _model_info
from reprise_worker.attention import TorchAttention
from reprise_worker.layer_groups import group_layers
from reprise_worker.memory import pool_size
from reprise_worker.model import PagedModel
from reprise_worker.settings import GIB, WorkerSettings
from support.tiny_models import paged, small_config, small_model


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return paged(small_model(small_config("Llama")))


PER_BLOCK = 3 * 2 * 2 * 16 * 8 * 4  # layers, k and v, heads, tokens, dim, bytes


def size(model: PagedModel, **settings: int) -> int:
    groups = group_layers(model.layers, model.windows)
    return pool_size(WorkerSettings(model_path="x", **settings), model, groups, TorchAttention())  # type: ignore[arg-type]


def test_the_budget_decides_unless_blocks_are_given(model: PagedModel) -> None:
    assert size(model, num_blocks=77, kv_memory_bytes=10) == 77
    assert size(model, kv_memory_bytes=PER_BLOCK * 10 + 1) == 10


def test_the_automatic_budget_is_a_quarter_and_bounded(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: PER_BLOCK * 400)
    assert size(model) == 100
    monkeypatch.setattr(memory, "available_bytes", lambda: 100 * GIB)
    assert size(model) == 4 * GIB // PER_BLOCK


def test_available_memory_is_plausible() -> None:
    assert 0 < memory.available_bytes() < 1024 * GIB * 16


@pytest.mark.parametrize("settings", [{"num_blocks": 1}, {"kv_memory_bytes": PER_BLOCK}])
def test_a_pool_without_room_is_refused(model: PagedModel, settings: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="at least 2"):
        size(model, **settings)


def test_a_full_step_fits_the_scratch_cache(model: PagedModel) -> None:
    """The profiling run of CUDA works on any device."""
    settings = WorkerSettings(model_path="x", max_num_batched_tokens=600)
    memory._run_full_step(settings, model, TorchAttention())


def test_a_sequence_limit_beyond_the_model_is_refused(model: PagedModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="257 exceeds the model's limit of 256"):
        _model_info(WorkerSettings(model_path="x", max_model_len=257), tmp_path, model, ())


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert _device("auto").type == "cpu"
    with pytest.raises(InvalidInput, match="no CUDA device"):
        _device("cuda")


@pytest.mark.parametrize(
    ("name", "value"), [("DEVICE", "tpu"), ("BLOCK_SIZE", "0"), ("NAMESPACE", "a:b"), ("CAPCITY", "1")]
)
def test_bad_settings_are_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPRISE_WORKER_MODEL_PATH", "x")
    monkeypatch.setenv(f"REPRISE_WORKER_{name}", value)
    with pytest.raises(SystemExit):
        load_settings(WorkerSettings)
    assert f"REPRISE_WORKER_{name}" in capsys.readouterr().err


def test_a_missing_model_path_is_named(capsys: pytest.CaptureFixture[str], clean_env: None) -> None:
    with pytest.raises(SystemExit):
        load_settings(WorkerSettings)
    assert "REPRISE_WORKER_MODEL_PATH" in capsys.readouterr().err


@pytest.fixture
def clean_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPRISE_WORKER_MODEL_PATH", raising=False)
