"""The log-probabilities of one request, kept so that its gateway can be told them again."""

from reprise_core.logprobs import row_nbytes
from reprise_core.requests import SamplingParams


class KeptLogprobs:
    """Packed rows, as far as they are known; the first value of each stays whatever is computed again.

    Limit: a row per token of the request, and `MAX_PROMPT_LOGPROB_BYTES` of the prompt's.
    """

    __slots__ = ("_first_index", "_output", "_output_row", "_prompt_row", "prompt")

    def __init__(self, sampling: SamplingParams, *, first_index: int) -> None:
        """`first_index`: of the first output token that is drawn here; earlier ones came with the request."""
        self._first_index = first_index
        self._output_row = row_nbytes(sampling.logprobs or 0)
        self._prompt_row = row_nbytes(sampling.prompt_logprobs or 0)
        self._output = bytearray()
        self.prompt = bytearray()
        """A row per prompt token from the second on."""

    @classmethod
    def of(cls, sampling: SamplingParams, *, first_index: int) -> "KeptLogprobs | None":
        """None when nobody asked for any."""
        asked = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        return cls(sampling, first_index=first_index) if asked else None

    def add_output(self, rows: bytes) -> None:
        self._output += rows

    def add_prompt(self, position: int, rows: bytes) -> None:
        """Rows of the positions from `position` on. A preempted request begins anew at 0."""
        self.prompt += rows[len(self.prompt) - position * self._prompt_row :]

    def output_from(self, index: int) -> bytearray:
        """Rows of the output tokens from `index` on."""
        return self._output[max(index - self._first_index, 0) * self._output_row :]
