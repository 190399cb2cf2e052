"""The `reprise` command."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from reprise_cli.event_commands import events

DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="A prefix-caching inference engine in six services."
)
conformance = typer.Typer(no_args_is_help=True, help="Compare with recordings of the reference.")
app.add_typer(conformance, name="conformance")
app.add_typer(events, name="events")

Paths = Annotated[list[Path], typer.Argument(help="Files (plain or .gz) or folders.", exists=True)]
Url = Annotated[str, typer.Option(help="The gateway.", envvar="REPRISE_URL")]
Model = Annotated[str, typer.Option(help="Model name; empty = the first one served.")]
ApiKey = Annotated[str, typer.Option(envvar="REPRISE_API_KEY", help="Sent as bearer token.")]


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Option(envvar="MODEL", help="Hugging Face id or local path; empty = SmolLM2-135M-Instruct."),
    ] = "",
    served_model_name: Annotated[
        str, typer.Option(help="Name that clients ask for; empty = the model's.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address of the HTTP port.")] = "127.0.0.1",
    port_base: Annotated[int, typer.Option(help="HTTP on this port, the rest above it.")] = 8000,
    engines: Annotated[int, typer.Option(help="Schedulers, each with a worker and a publisher.")] = 1,
    state_dir: Annotated[Path | None, typer.Option(help="Files of this installation.")] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(envvar="REPRISE_CACHE_DIR", help="Converted and downloaded models.")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Endpoints as JSON, written when all is ready.")
    ] = None,
    dev_mode: Annotated[bool, typer.Option(help="Serve POST /reset_prefix_cache.")] = False,
    redis: Annotated[bool, typer.Option(help="Start a Valkey or Redis for external blocks.")] = True,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
    num_gpu_blocks_override: Annotated[int, typer.Option(help="Blocks in the pool; 0 = from memory.")] = 0,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt and answer; 0 = the model's.")] = 0,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens per step.")] = 2048,
    long_prefill_token_threshold: Annotated[
        int, typer.Option(min=0, help="Tokens of one prompt per step; 0 = no limit of its own.")
    ] = 0,
    enable_chunked_prefill: Annotated[
        bool, typer.Option(help="Off: a prompt waits for a step with room for all of it.")
    ] = True,
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], typer.Option(help="Who is served first.")
    ] = "fcfs",
    watermark: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the pool that admissions leave free.")
    ] = 0.0,
    scheduler_reserve_full_isl: Annotated[
        bool, typer.Option(help="Admit a request only when its whole present sequence fits.")
    ] = True,
    max_num_queued_reqs: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 1024,
    max_num_queued_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of requests that may wait; 0 = no limit.")
    ] = 0,
    async_scheduling: Annotated[bool, typer.Option(help="Plan a step while the one before runs.")] = True,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse KV blocks.")] = True,
    prefix_caching_hash_algo: Annotated[
        str, typer.Option(help="sha256, sha256_cbor, xxhash, xxhash_cbor.")
    ] = "sha256",
    eviction_policy: Annotated[
        str, typer.Option(help="module:Class; empty = least recently used. See docs/research.md.")
    ] = "",
    kv_events_config: Annotated[
        str, typer.Option(help="JSON, as the reference's; {} or null = off; empty = on.")
    ] = "",
    event_token_ids: Annotated[
        bool, typer.Option(help="Off: KV events carry no token ids, for subscribers that need only hashes.")
    ] = True,
    kv_transfer_config: Annotated[
        str,
        typer.Option(help="JSON: kv_connector, kv_role, kv_load_failure_policy; {} or null = no store."),
    ] = "",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    lora_modules: Annotated[
        str, typer.Option(help="LoRA adapters in PEFT's format: NAME=PATH,NAME=PATH, or JSON.")
    ] = "",
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Of any adapter.")] = 16,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    trace_dir: Annotated[
        Path | None, typer.Option(help="Trace every request; spans go to this folder (`reprise trace`).")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of a service: store.capacity_bytes=0")
    ] = None,
) -> None:
    """Run the whole system as local processes; Ctrl-C stops it."""
    from reprise_cli.serve import command
    from reprise_cli.serve.engine_options import EngineOptions, read_events_config, read_transfer_config
    from reprise_cli.serve.layout import ServeOptions
    from reprise_cli.serve.redis_binary import find_redis
    from reprise_core.errors import InvalidInput

    try:
        kv_events, transfer = read_events_config(kv_events_config), read_transfer_config(kv_transfer_config)
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from error
    overrides = EngineOptions(
        block_size=block_size,
        num_blocks=num_gpu_blocks_override,
        max_model_len=max_model_len,
        dtype=dtype,
        lora_modules=lora_modules,
        max_lora_rank=max_lora_rank,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=long_prefill_token_threshold,
        enable_chunked_prefill=enable_chunked_prefill,
        scheduling_policy=scheduling_policy,
        watermark=watermark,
        must_fit=scheduler_reserve_full_isl,
        max_num_waiting=max_num_queued_reqs,
        max_num_waiting_tokens=max_num_queued_tokens,
        async_scheduling=async_scheduling,
        enable_prefix_caching=enable_prefix_caching,
        prefix_caching_hash_algo=prefix_caching_hash_algo,
        eviction_policy=eviction_policy,
        transfer=transfer,
    ).overrides()
    overrides["publisher"] = {"event_token_ids": str(event_token_ids)}
    overrides["gateway"] = {"dev_mode": str(dev_mode)}
    _add_settings(overrides, setting or [])
    model_path = command.prepare_model(model, (cache_dir or command.default_cache_dir()).expanduser())
    options = ServeOptions(
        model_path=model_path,
        model_name=served_model_name or _model_name(model, model_path),
        state_dir=(state_dir or _default_state_dir(port_base)).expanduser().absolute(),
        host=host,
        port_base=port_base,
        engines=engines,
        redis_command=find_redis() if redis else None,
        log_level=log_level,
        kv_events=kv_events,
        trace_dir=trace_dir.expanduser().absolute() if trace_dir is not None else None,
        overrides=overrides,
    )
    raise typer.Exit(command.serve(options, ready_file=ready_file))


def _add_settings(overrides: dict[str, dict[str, str]], settings: list[str]) -> None:
    services = ("gateway", "tokenizer", "scheduler", "worker", "store", "publisher")
    for item in settings:
        name, equals, value = item.partition("=")
        service, dot, key = name.partition(".")
        if not equals or not dot or service not in services:
            raise typer.BadParameter(
                f"{item!r}; give SERVICE.NAME=VALUE, SERVICE one of {', '.join(services)}"
            )
        overrides.setdefault(service, {})[key] = value


def _model_name(model: str, model_path: Path) -> str:
    """What was asked for; a local path is called by its folder."""
    return model if model and not Path(model).exists() else model_path.name


def _default_state_dir(port_base: int) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "reprise" / str(port_base)


@app.command()
def chat(
    url: Url = DEFAULT_URL,
    model: Model = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    api_key: ApiKey = "",
) -> None:
    """Chat in the terminal, with the figures of each answer."""
    from reprise_cli.chat import chat as run

    raise typer.Exit(run(url, model=model, system=system, max_tokens=max_tokens, api_key=api_key))


@app.command()
def demo(url: Url = DEFAULT_URL, model: Model = "", api_key: ApiKey = "") -> None:
    """Four turns of one user and one of another, and what was reused."""
    from reprise_cli.demo import demo as run

    raise typer.Exit(run(url, model=model, api_key=api_key))


@app.command()
def trace(
    trace_dir: Annotated[
        Path, typer.Option(envvar="REPRISE_TRACE_DIR", help="The folder given to `reprise serve`.")
    ],
    url: Url = DEFAULT_URL,
    model: Model = "",
    prompt: Annotated[str, typer.Option(help="Sent as one user message.")] = "Tell me about rivers.",
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 32,
    trace_id: Annotated[
        str, typer.Option(help="Show this earlier request instead: its trace id or traceparent.")
    ] = "",
    api_key: ApiKey = "",
) -> None:
    """Where the time of one request went: HTTP, tokenize + hash, queue, plan, wire, model, detokenize."""
    from reprise_cli.trace import trace as run

    code = run(
        url,
        trace_dir=trace_dir,
        prompt=prompt,
        trace_id=trace_id,
        model=model,
        max_tokens=max_tokens,
        api_key=api_key,
    )
    raise typer.Exit(code)


@app.command()
def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="hashing, hashing-limit, hashing-append, kv-cache, eviction, events, step, split, store, "
            "first-token."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    policy: Annotated[
        list[str] | None, typer.Option(help="With eviction: a policy to compare, module:Class.")
    ] = None,
) -> None:
    """Measure speed, as ratios against a peer or a limit in the same run."""
    from reprise_cli.bench.registry import benches
    from reprise_cli.bench.report import print_report
    from reprise_core.errors import InvalidInput
    from reprise_runtime.logs import configure_logs

    # Services in this process log to stderr, so that stdout has the report alone.
    configure_logs("bench", level="warning", log_format="console")
    known = benches(policies=policy or ())
    if name not in known:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}")
    if policy and name != "eviction":
        raise typer.BadParameter("--policy is for eviction alone")
    try:
        rows = known[name]()
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from error
    print_report(name, rows, json_output=as_json)


@conformance.command("hashes")
def conformance_hashes(paths: Paths) -> None:
    """Block hashes, extra keys, serialised bytes."""
    from reprise_cli.conformance import hashes

    raise typer.Exit(hashes(paths))


@conformance.command("events")
def conformance_events(paths: Paths) -> None:
    """Encoded events, frames, replay, endpoint rules."""
    from reprise_cli.conformance import events as run

    raise typer.Exit(run(paths))


@conformance.command("kv-traces")
def conformance_kv_traces(paths: Paths) -> None:
    """Step-by-step traces of the KV cache manager."""
    from reprise_cli.conformance_kv import kv_traces

    raise typer.Exit(kv_traces([str(path) for path in paths]))


@conformance.command("pool")
def conformance_pool(paths: Paths) -> None:
    """Traces of the block pool."""
    from reprise_cli.conformance_kv import pool

    raise typer.Exit(pool([str(path) for path in paths]))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
