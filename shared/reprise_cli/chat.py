"""`reprise chat`: a terminal chat that shows what each answer cost and which tokens were reused."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from reprise_core.errors import RepriseError, Unavailable

TIERS = ("device", "host", "disk", "external")
Message = dict[str, str]


@dataclass(slots=True)
class Answer:
    """One streamed answer and its figures. Times in seconds."""

    text: str = ""
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, the first token left out."""
        decode_s = self.total_s - self.time_to_first_token_s
        return (self.completion_tokens - 1) / decode_s if self.completion_tokens > 1 and decode_s > 0 else 0.0


class GatewayClient:
    def __init__(self, url: str, api_key: str = "", *, traceparent: str = "") -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if traceparent:
            headers["traceparent"] = traceparent
        self._http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(600.0, connect=5.0))
        self.url = url

    def model(self) -> str:
        """The first model served."""
        return str(self._get("/v1/models").json()["data"][0]["id"])

    def metrics(self) -> str:
        return self._get("/metrics").text

    def _get(self, path: str) -> httpx.Response:
        try:
            answer = self._http.get(path)
        except httpx.TransportError as error:
            raise Unavailable(
                f"nothing answers at {self.url} ({error}); start it with `make serve`"
            ) from error
        _check(answer)
        return answer

    def chat(
        self,
        model: str,
        messages: list[Message],
        *,
        max_tokens: int,
        on_text: Callable[[str], None],
        **options: Any,
    ) -> Answer:
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        answer = Answer()
        started_s = time.monotonic()
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                _check(response)
            for event in _events(response.iter_lines()):
                _take(event, answer, started_s, on_text)
        answer.total_s = time.monotonic() - started_s
        return answer


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Unavailable(str(event["error"].get("message", event["error"])))
            yield event


def _take(event: dict[str, Any], answer: Answer, started_s: float, on_text: Callable[[str], None]) -> None:
    for choice in event.get("choices", ()):
        text = choice["delta"].get("content") or ""
        if text and not answer.text:
            answer.time_to_first_token_s = time.monotonic() - started_s
        answer.text += text
        on_text(text)
    usage = event.get("usage")
    if usage:
        details = usage.get("prompt_tokens_details") or {}
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        answer.cached_tokens = details.get("cached_tokens") or 0
        answer.cached_by_tier.update(details.get("cached_by_source") or {})


def _check(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        return
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:300]
    raise Unavailable(f"{answer.request.url.path}: {answer.status_code}: {message}")


def describe(answer: Answer) -> str:
    """One line: speed, and which prompt tokens came from where."""
    reused = ", ".join(f"{count} from {tier}" for tier, count in answer.cached_by_tier.items() if count)
    computed = answer.prompt_tokens - answer.cached_tokens
    return (
        f"first token {answer.time_to_first_token_s * 1000:.0f} ms · {answer.tokens_per_s:.0f} tokens/s · "
        f"prompt {answer.prompt_tokens}: {reused or 'nothing reused'}, {computed} computed"
    )


def chat(url: str, *, model: str = "", system: str = "", max_tokens: int = 256, api_key: str = "") -> int:
    console = Console()
    client = GatewayClient(url, api_key)
    try:
        model = model or client.model()
        console.print(
            f"{model} at {url}. An empty line or Ctrl-D ends the chat.", style="dim", highlight=False
        )
        _converse(console, client, model, system, max_tokens)
    except RepriseError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    return 0


def _converse(console: Console, client: GatewayClient, model: str, system: str, max_tokens: int) -> None:
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            question = console.input("[bold]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not question:
            return
        messages.append({"role": "user", "content": question})
        answer = client.chat(
            model, messages, max_tokens=max_tokens, on_text=lambda text: print(text, end="", flush=True)
        )
        print()
        console.print(describe(answer), style="dim", highlight=False)
        messages.append({"role": "assistant", "content": answer.text})
