"""`reprise demo`: four turns of one user and one of another with the same system prompt, as a table."""

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from reprise_cli.chat import TIERS, Answer, GatewayClient, Message
from reprise_core.errors import RepriseError

SYSTEM = """\
You are the assistant of a small public library. Answer in one or two short sentences. The library is
open from nine to six on weekdays and from ten to two on Saturdays. Books are lent for four weeks and
can be renewed twice, unless somebody else waits for them. Films and games are lent for one week and
cannot be renewed. A card is free for children and costs twenty a year for everybody else. The reading
room has forty seats, six computers and a printer; printing costs ten cents a page. Every first Tuesday
of the month the book club meets at seven in the evening, and newcomers are welcome."""
ALICE = (
    "Hello! When can I come on a Saturday?",
    "How long may I keep a book?",
    "And a film?",
    "What does a card cost?",
)
BOB = "Hi, when does the book club meet?"
TOTALS = (
    ("vllm:prompt_tokens_total", "prompt tokens"),
    ("vllm:prompt_tokens_cached_total", "of them reused"),
    ("vllm:prefix_cache_queries_total", "tokens looked up"),
    ("vllm:prefix_cache_hits_total", "tokens found"),
    ("vllm:external_prefix_cache_queries_total", "asked of the store"),
    ("vllm:external_prefix_cache_hits_total", "loaded from the store"),
    ("vllm:generation_tokens_total", "generated tokens"),
)


def demo(url: str, *, model: str = "", max_tokens: int = 40, api_key: str = "") -> int:
    console = Console()
    client = GatewayClient(url, api_key)
    try:
        model = model or client.model()
        rows = _talk(console, client, model, max_tokens)
        console.print(_table(model, rows))
        console.print(_totals(client.metrics()))
    except RepriseError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    return 0


def _talk(console: Console, client: GatewayClient, model: str, max_tokens: int) -> list[tuple[str, Answer]]:
    rows: list[tuple[str, Answer]] = []
    system: Message = {"role": "system", "content": SYSTEM}
    history = [system]
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("talking", total=None)

        def ask(who: str, messages: list[Message]) -> Answer:
            progress.update(task, description=f"{who}: {messages[-1]['content']}")
            answer = client.chat(
                model, messages, max_tokens=max_tokens, on_text=lambda text: None, temperature=0.0
            )
            rows.append((who, answer))
            return answer

        for turn, question in enumerate(ALICE, 1):
            history.append({"role": "user", "content": question})
            answer = ask(f"Alice {turn}", history)
            history.append({"role": "assistant", "content": answer.text})
        ask("Bob 1", [system, {"role": "user", "content": BOB}])
    return rows


def _table(model: str, rows: Iterable[tuple[str, Answer]]) -> Table:
    table = _plain_table(f"{model}: where the prompt's tokens came from")
    table.add_column("turn", no_wrap=True)
    for name in ("prompt", *TIERS, "computed", "TTFT ms", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for who, answer in rows:
        table.add_row(
            who,
            str(answer.prompt_tokens),
            *(str(answer.cached_by_tier[tier]) for tier in TIERS),
            str(answer.prompt_tokens - answer.cached_tokens),
            f"{answer.time_to_first_token_s * 1000:.0f}",
            f"{answer.tokens_per_s:.0f}",
        )
    return table


def _totals(text: str) -> Table:
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    table = _plain_table("Totals from /metrics, since the start")
    table.add_column("metric")
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, what in TOTALS:
        table.add_row(name, what, f"{sums.get(name, 0.0):.0f}")
    return table


def _plain_table(title: str) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
