"""Sampling parameters and the ways a request ends."""

from enum import Enum

import msgspec


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn and when a request ends by itself.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; `seed` None draws from the
    worker's own randomness. Stop strings are not here: text is the tokenizer's, and a match is
    told to the scheduler as a finish at a token index.

    `logprobs` and `prompt_logprobs` count the most probable tokens that are given beside each output
    and each prompt token, 0 to `MAX_LOGPROBS`; None = no log-probabilities.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class PromptSources(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of a prompt's tokens came from, in tokens; the rest was computed."""

    prompt_tokens: int
    device: int = 0
    host: int = 0
    disk: int = 0
    external: int = 0

    @property
    def cached(self) -> int:
        return self.device + self.host + self.disk + self.external
