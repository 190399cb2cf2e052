"""What a newcomer types: chat, demo, events tail, conformance."""

import json
import re
import subprocess
import sys
from pathlib import Path

from support.system import System

VECTORS = Path(__file__).resolve().parents[1] / "conformance" / "vectors"


def reprise(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "reprise_cli", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_chat_shows_what_each_answer_cost(system: System) -> None:
    done = reprise("chat", "--url", system.url, "--max-tokens", "8", typed="Hello there!\nAnd again.\n")
    assert done.returncode == 0, done.stderr
    figures = re.findall(
        r"first token \d+ ms · \d+ tokens/s · prompt (\d+): (.*), (\d+) computed", done.stdout
    )
    assert len(figures) == 2
    prompt, reused, computed = figures[1]
    assert re.fullmatch(r"\d+ from device", reused)
    assert int(reused.split()[0]) + int(computed) == int(prompt)


def test_demo_prints_what_was_reused(system: System) -> None:
    done = reprise("demo", "--url", system.url)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(Alice \d|Bob 1) +(\d+) +(\d+) ", done.stdout)
    assert [name for name, _, _ in rows] == ["Alice 1", "Alice 2", "Alice 3", "Alice 4", "Bob 1"]
    reused = [int(device) for _, _, device in rows]
    assert all(later > 0 for later in reused[1:])
    assert "vllm:prefix_cache_hits_total" in done.stdout


def test_commands_say_plainly_when_nothing_answers() -> None:
    for command in ("chat", "demo"):
        done = reprise(command, "--url", "http://127.0.0.1:9")
        assert done.returncode == 1
        assert "nothing answers at http://127.0.0.1:9" in done.stdout
        assert "Traceback" not in done.stderr


def test_events_tail_replays_from_the_start(system: System) -> None:
    system.post("/v1/completions", {"prompt": list(range(700, 740)), "max_tokens": 1})
    engine = system.endpoints["engines"][0]
    done = reprise(
        *("events", "tail", "--endpoint", engine["events"], "--replay", engine["replay"]),
        *("--from", "0", "--count", "2", "--json"),
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["seq"] for line in lines] == [0, 1]
    assert "AllBlocksCleared" in str(lines[0])


def test_conformance_ends_with_a_count_and_a_status(tmp_path: Path) -> None:
    done = reprise("conformance", "events", str(VECTORS / "events_wire.jsonl"))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "391 passed, 0 failed")
    row = json.loads((VECTORS / "pool_trace.jsonl").read_text().splitlines()[0])
    row["ops"][1]["usage"] = 0.987
    (tmp_path / "wrong.jsonl").write_text(json.dumps(row) + "\n")
    done = reprise("conformance", "pool", str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed"
    assert "usage" in done.stdout
    assert "0.987" in done.stdout
