"""The fields that ask for log-probabilities."""

from dataclasses import dataclass
from typing import Any

from reprise_core.logprobs import MAX_LOGPROBS
from reprise_gateway.errors import bad_rule


@dataclass(frozen=True, slots=True)
class LogprobFields:
    """How many of the most probable tokens are given beside each token; None = no log-probabilities."""

    output: int | None = None
    prompt: int | None = None
    echoes: bool = False
    """Whether the output's list begins with the prompt's tokens."""
    ids_for_texts: bool = False
    """Tokens of the output's list are written as `token_id:N`."""

    @property
    def measured_prompt(self) -> int | None:
        """What an engine is asked for of the prompt."""
        echoed = self.output if self.echoes else None
        return max((count for count in (self.prompt, echoed) if count is not None), default=None)


def completion_logprobs(
    logprobs: Any, prompt_logprobs: Any, *, echo: bool, stream: bool, ids_for_texts: bool
) -> LogprobFields:
    count = _count("logprobs", logprobs)
    if count is not None and echo and stream:
        raise bad_rule("logprobs", f"logprobs: {count}, not available with both echo and stream true")
    return LogprobFields(count, _prompt_count(prompt_logprobs, stream), echo, ids_for_texts)


def chat_logprobs(
    logprobs: Any, top_logprobs: Any, prompt_logprobs: Any, *, stream: bool, ids_for_texts: bool
) -> LogprobFields:
    if logprobs is not None and not isinstance(logprobs, bool):
        raise bad_rule("logprobs", f"logprobs: {logprobs!r:.60}, must be true or false")
    count = _count("top_logprobs", top_logprobs) or 0
    if count and not logprobs:
        raise bad_rule("top_logprobs", f"top_logprobs: {count}, only allowed with logprobs true")
    return LogprobFields(
        count if logprobs else None, _prompt_count(prompt_logprobs, stream), ids_for_texts=ids_for_texts
    )


def _prompt_count(value: Any, stream: bool) -> int | None:
    count = _count("prompt_logprobs", value)
    if count is not None and stream:
        raise bad_rule("prompt_logprobs", f"prompt_logprobs: {count}, not available with stream true")
    return count


def _count(name: str, value: Any) -> int | None:
    if value is None or value is False:
        return None
    if type(value) is not int or not 0 <= value <= MAX_LOGPROBS:
        raise bad_rule(name, f"{name}: {value!r:.60}, must be a whole number from 0 to {MAX_LOGPROBS}")
    return value
