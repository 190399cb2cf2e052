"""`python -m reprise_worker.prepare --model MODEL --cache-dir DIR`: a local folder for any model.

MODEL is empty or `smollm2-135m-instruct` (the default model, without a hub), a local folder, or a
Hugging Face id. Prints the folder's path on stdout and nothing else; progress goes to stderr. Ends
with exit status 1 and one sentence when the model cannot be served. A model that is there already
costs no import of torch.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from reprise_worker.gguf_model import (
    MODEL_NAME,
    Progress,
    default_model_folder,
    is_prepared,
    prepare_default_model,
)
from reprise_worker.model_folder import BadModel, check_config, check_model_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIG_PATTERNS = ["*.json", "*.jinja"]
_WEIGHT_PATTERNS = [*_CONFIG_PATTERNS, "*.safetensors"]
# Subfolders hold other formats (onnx, original); consolidated files repeat the weights.
_IGNORED_PATTERNS = ["*/*", "consolidated*"]


def prepare(model: str, cache_dir: Path, progress: Progress) -> Path:
    """The checked local folder of `model`; raises BadModel."""
    if model.strip().lower() in ("", MODEL_NAME):
        folder = prepare_default_model(cache_dir, progress)
        check_model_folder(folder)
        return folder
    local = Path(model).expanduser()
    if local.is_dir() or model.startswith(("/", "./", "../", "~")):
        check_model_folder(local)
        return local.resolve()
    if not _HUB_ID.fullmatch(model):
        raise BadModel(
            f"model {model!r} is neither an existing local folder nor a Hugging Face id (OWNER/NAME)"
        )
    return _from_hub(model, cache_dir / "hub", progress)


def needs_work(model: str, cache_dir: Path) -> bool:
    """Whether `prepare` may take long, so that progress is worth showing."""
    if model.strip().lower() in ("", MODEL_NAME):
        return not is_prepared(default_model_folder(cache_dir))
    return not Path(model).expanduser().is_dir()


def _from_hub(model: str, cache_dir: Path, progress: Progress) -> Path:
    """What was fetched before is used without asking the hub; else config first, then weights."""
    progress.stage(f"looking for {model}")
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()

    def fetch(patterns: list[str], local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                model,
                cache_dir=cache_dir,
                allow_patterns=patterns,
                ignore_patterns=_IGNORED_PATTERNS,
                local_files_only=local_files_only,
            )
        )

    try:
        folder = fetch(_WEIGHT_PATTERNS, True)
        check_model_folder(folder)
        return folder
    except (BadModel, OSError):
        pass  # not there, or not whole: ask the hub
    try:
        check_config(fetch(_CONFIG_PATTERNS, False))
        progress.stage(f"fetching {model}")
        folder = fetch(_WEIGHT_PATTERNS, False)
    except BadModel as error:
        raise BadModel(str(error).replace(str(cache_dir), model, 1)) from error
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadModel(f"cannot fetch model {model!r} from the Hugging Face hub: {reason}") from error
    check_model_folder(folder)
    return folder


class _NoProgress:
    def stage(self, text: str, total: float | None = None) -> None:
        """Nothing is shown."""

    def advance_to(self, done: float) -> None:
        """Nothing is shown."""


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    from rich import progress as bars
    from rich.console import Console

    class Bar:
        def stage(self, text: str, total: float | None = None) -> None:
            columns.reset(task, description=text, total=total)

        def advance_to(self, done: float) -> None:
            columns.update(task, completed=done)

    columns = bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with columns:
        task = columns.add_task("starting", total=None)
        yield Bar()


def _point(link: Path, folder: Path) -> None:
    """Makes or moves the link in one step; relative, so that both may be mounted elsewhere together."""
    if link.exists() and not link.is_symlink():
        raise BadModel(f"--link {link}: something is there that is not a symbolic link")
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    draft.symlink_to(os.path.relpath(folder.resolve(), link.parent.resolve()), target_is_directory=True)
    draft.replace(link)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reprise_worker.prepare", description=__doc__)
    parser.add_argument("--model", default="", help="empty for the default model, a folder, or a hub id")
    parser.add_argument("--cache-dir", type=Path, required=True, help="where fetched models are kept")
    parser.add_argument("--link", type=Path, help="symbolic link to point at the folder, for a known path")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    options = parser.parse_args(arguments)
    try:
        if options.quiet or not needs_work(options.model, options.cache_dir):
            folder = prepare(options.model, options.cache_dir, _NoProgress())
        else:
            with _progress_bar() as progress:
                folder = prepare(options.model, options.cache_dir, progress)
        if options.link is not None:
            _point(options.link, folder)
    except (BadModel, OSError) as error:
        print(f"model: {error}", file=sys.stderr)
        return 1
    print(folder.resolve())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
