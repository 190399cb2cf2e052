"""The model's fingerprint: blocks of two models are interchangeable when their fingerprints are equal.

Reading all weights costs seconds per gigabyte, so their digest is kept beside them (or in a folder
that the settings name), keyed by the files' names, sizes and modification times.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reprise_worker.kv_cache import LAYOUT_VERSION
from reprise_worker.layer_groups import LayerGroup
from reprise_worker.model_folder import weight_files

_CACHE_NAME = ".reprise-weights-digest.json"
_READ_NBYTES = 16 * 1024 * 1024
# Of config.json: what says how a file was made, not what the model computes.
_IGNORED_CONFIG = frozenset({"transformers_version", "_name_or_path", "use_cache", "id2label", "label2id"})


def model_fingerprint(
    folder: Path,
    *,
    dtype: str,
    block_size: int,
    architecture: str,
    cache_dir: Path | None,
    offload_dtype: str = "auto",
    groups: Sequence[LayerGroup] = (),
) -> str:
    """32 hexadecimal digits. `offload_dtype`: blocks that were stored with a loss meet no others; `groups`:
    nor do blocks of other layers."""
    config = json.loads((folder / "config.json").read_bytes())
    facts = {
        "weights": weights_digest(folder, cache_dir),
        # Attention, rope and window settings are all in here.
        "config": {name: value for name, value in config.items() if name not in _IGNORED_CONFIG},
        "architecture": architecture,
        "dtype": dtype,
        "block_size": block_size,
        "kv_layout": LAYOUT_VERSION,
    }
    if len(groups) > 1:
        facts["kv_groups"] = [group.layers for group in groups]
    if offload_dtype != "auto":
        facts["offload_dtype"] = offload_dtype
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def weights_digest(folder: Path, cache_dir: Path | None) -> str:
    """Digest of the weight files' content, from the cache where they have not changed."""
    files = weight_files(folder)
    key = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    places = [folder / _CACHE_NAME]
    if cache_dir is not None:
        name = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
        places.append(cache_dir / f"{name}.json")
    for place in places:
        cached = _read(place)
        if cached.get("files") == key and isinstance(cached.get("digest"), str):
            return str(cached["digest"])
    digest = _digest(files)
    for place in places:
        if _write(place, {"files": key, "digest": digest}):
            break
    return digest


def _digest(files: list[Path]) -> str:
    total = hashlib.blake2b(digest_size=32)
    for path in files:
        content = hashlib.blake2b(digest_size=32)
        with path.open("rb") as file:
            while data := file.read(_READ_NBYTES):
                content.update(data)
        total.update(path.name.encode() + b"\0" + content.digest())
    return total.hexdigest()


def _read(place: Path) -> dict[str, Any]:
    try:
        content = json.loads(place.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(place: Path, content: dict[str, Any]) -> bool:
    """Whole or not at all; False where the folder cannot be written."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=place.name)
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        os.chmod(temporary, 0o644)  # readable for whoever serves the model
        os.replace(temporary, place)
    except OSError:
        return False
    return True
