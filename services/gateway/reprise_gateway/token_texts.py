"""Texts of single tokens, for log-probabilities."""

from collections.abc import Iterable

from reprise_gateway.completions import Prompts


class TokenTexts:
    """Asks the tokenizer once for each id. Limit: the vocabulary, for ids come from engines."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._known: dict[int, bytes] = {}

    async def know(self, token_ids: Iterable[int]) -> None:
        """From then on these have bytes. Raises ApiError."""
        missing = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self._known]
        if missing:
            self._known.update(zip(missing, await self._prompts.token_bytes(missing), strict=True))

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text, which may be a part of a character."""
        return self._known[token_id]

    def text_of(self, token_id: int) -> str:
        return self._known[token_id].decode(errors="replace")
