"""What `reprise serve` does, start to finish."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from reprise_cli.serve.layout import Layout, ServeOptions, make_layout
from reprise_cli.serve.supervisor import StartFailed, Supervisor
from reprise_core.errors import InvalidInput

START_TIMEOUT_S = 180.0


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "reprise" / "models"


def prepare_model(model: str, cache_dir: Path) -> Path:
    """The local folder of a model; converts or downloads it once, with a progress bar on stderr."""
    command = [
        sys.executable,
        "-m",
        "reprise_worker.prepare",
        "--model",
        model,
        "--cache-dir",
        str(cache_dir),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)  # it has said why
    return Path(done.stdout.strip())


def serve(options: ServeOptions, *, ready_file: Path | None, timeout_s: float = START_TIMEOUT_S) -> int:
    console = Console(stderr=True)
    try:
        layout = make_layout(options)
        _check_ports(layout)
        (options.state_dir / "redis").mkdir(parents=True, exist_ok=True)
        return asyncio.run(_live(options, layout, ready_file, console, timeout_s))
    except (InvalidInput, StartFailed) as error:
        console.print(f"reprise serve: {error}", style="red", markup=False, highlight=False)
        return 1
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


async def _live(
    options: ServeOptions, layout: Layout, ready_file: Path | None, console: Console, timeout_s: float
) -> int:
    started_s = time.monotonic()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    if options.redis_command is None:
        console.print("No Redis or Valkey here: the store runs on memory alone.", style="yellow")
    with console.status("starting") as status:
        waiting = [spec.name for spec in layout.processes]

        def on_ready(name: str) -> None:
            waiting.remove(name)
            status.update(f"waiting for {', '.join(waiting)}")

        supervisor = Supervisor(layout.processes, on_ready=on_ready)
        start = asyncio.ensure_future(supervisor.start(timeout_s))
        stopped = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            return 130
        start.result()
    if ready_file is not None:
        _write_ready_file(ready_file, layout)
    _print_banner(console, options, layout, time.monotonic() - started_s)
    await stopped
    console.print("stopping", style="dim")
    await supervisor.stop()
    return 0


def _write_ready_file(path: Path, layout: Layout) -> None:
    """Appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(layout.endpoints, indent=2) + "\n")
    draft.replace(path)


def _print_banner(console: Console, options: ServeOptions, layout: Layout, took_s: float) -> None:
    url = layout.endpoints["gateway"]
    body = json.dumps({"model": options.model_name, "messages": [{"role": "user", "content": "Hello!"}]})
    chat = "reprise chat" if options.port_base == 8000 else f"reprise chat --url {url}"
    headline = f"\nReprise serves {options.model_name} at {url}  (ready in {took_s:.1f} s)"
    console.print(headline, style="bold green", highlight=False)
    console.print(
        f"\n  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
        f"\n  .venv/bin/{chat}"
        f"\n  .venv/bin/{chat.replace(' chat', ' demo')}\n\nCtrl-C stops everything.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _check_ports(layout: Layout) -> None:
    taken = []
    for port in layout.ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                taken.append(str(port))
    if taken:
        raise StartFailed(f"ports in use: {', '.join(taken)}; choose another --port-base")
