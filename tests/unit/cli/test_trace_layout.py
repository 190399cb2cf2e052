"""`reprise serve --trace-dir`: each service that a request passes through writes a file of its own."""

from pathlib import Path

from reprise_cli.serve.layout import ServeOptions, make_layout


def exporters(trace_dir: Path | None) -> dict[str, str]:
    options = ServeOptions(
        model_path=Path("/models/m"), model_name="m", state_dir=Path("/state"), engines=2, trace_dir=trace_dir
    )
    return {
        spec.name: value
        for spec in make_layout(options).processes
        for name, value in spec.environment.items()
        if name.endswith("_TRACE_EXPORTER")
    }


def test_each_process_has_its_own_file() -> None:
    names = ("gateway", "tokenizer", "store", "scheduler-0", "scheduler-1")
    assert exporters(Path("/spans")) == {name: f"file:/spans/{name}.jsonl" for name in names}


def test_without_the_option_nothing_is_traced() -> None:
    assert exporters(None) == {}
