"""A model folder on disk, checked without importing torch: what every start can afford.

A folder is fit to serve when it has a decoder-only `config.json`, whole safetensors weights and a
`tokenizer.json`. Everything that is wrong is a `BadModel` with one sentence for the user.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any

from reprise_core.errors import ErrorKind, RepriseError

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_DECODER_SUFFIXES = ("ForCausalLM", "LMHeadModel")
# Their attention cannot be paged; the worker's dry run refuses others, but only after a load.
_UNPAGED_MODEL_TYPES = frozenset({"bloom", "falcon", "gptj", "mpt", "mamba", "mamba2", "rwkv"})
_MAX_HEADER_NBYTES = 100 * 1024 * 1024


class BadModel(RepriseError):
    """A model that is missing, broken or not supported; the message is one sentence."""

    kind = ErrorKind.INVALID


def check_model_folder(folder: Path) -> None:
    """Raises BadModel when `folder` cannot be served."""
    check_config(folder)
    for path in weight_files(folder):
        _check_safetensors(path)
    if not (folder / "tokenizer.json").is_file():
        raise BadModel(f"model {folder} has no tokenizer.json")
    _read_json(folder / "tokenizer_config.json")


def check_config(folder: Path) -> None:
    """The cheap half of the check: enough to refuse a model before its weights are fetched."""
    if not folder.is_dir():
        raise BadModel(f"model folder {folder} does not exist")
    config = _read_json(folder / "config.json")
    if "quantization_config" in config:
        raise BadModel(f"model {folder} has quantized weights, which are not supported")
    model_type = config.get("model_type")
    if model_type in _UNPAGED_MODEL_TYPES:
        raise BadModel(f"model {folder} is not supported: {model_type} models have no attention to page")
    architectures = config.get("architectures") or []
    known = [name for name in architectures if str(name).endswith(_DECODER_SUFFIXES)]
    if config.get("is_encoder_decoder") or not known:
        named = ", ".join(map(str, architectures)) or "none"
        raise BadModel(
            f"model {folder} is not supported: its config.json names architecture {named}, "
            "and only decoder-only causal language models are served"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, in name order."""
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        if not (folder / WEIGHTS).is_file():
            raise BadModel(f"model {folder} has no safetensors weights ({WEIGHTS} or {WEIGHTS_INDEX})")
        return [folder / WEIGHTS]
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModel(f"model file {index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if os.sep in name or not (folder / name).is_file()]
    if missing:
        raise BadModel(f"model {folder} lacks {len(missing)} of its weight files, first {missing[0]!r}")
    return [folder / name for name in names]


def _check_safetensors(path: Path) -> None:
    """The header parses and the file is as long as it says: catches downloads cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        header_nbytes = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < header_nbytes <= min(_MAX_HEADER_NBYTES, size - 8):
            raise BadModel(f"model file {path} is damaged: it has no safetensors header")
        try:
            header = json.loads(file.read(header_nbytes))
            ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise BadModel(f"model file {path} is damaged: its safetensors header does not parse") from error
    expected = 8 + header_nbytes + max(ends, default=0)
    if size != expected:
        raise BadModel(f"model file {path} is damaged: it has {size} bytes, its header says {expected}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise BadModel(f"model {path.parent} has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise BadModel(f"model file {path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadModel(f"model file {path} is not a JSON object")
    return content


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that end a sequence: of generation_config.json where it names any, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        value = _read_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = tuple(token for token in ids if isinstance(token, int))
        if found:
            return found
    return ()
