"""What the gateway needs from outside. The clients in `reprise_wire` implement it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from reprise_wire.clients.engine import EngineInfo, PinInfo, RequestDelta, ResetAnswer, Submission
from reprise_wire.clients.tokenizer import ChatPrompt, DetokenizeUpdate, TextDelta, TokenizedPrompt
from reprise_wire.hash_profiles import HashRequest, ProfileHashes


class EngineStream(Protocol):
    async def submit(self, submission: Submission) -> None: ...

    async def abort(self, request_id: str) -> None: ...

    async def finish(self, request_id: str, num_output_tokens: int) -> None: ...

    async def read(self) -> list[RequestDelta] | None: ...

    def cancel(self) -> None: ...


class EngineApi(Protocol):
    """Raises PeerError."""

    async def info(self) -> EngineInfo: ...

    async def attach(
        self, gateway_id: str, resume: Mapping[str, int], *, timeout_s: float
    ) -> EngineStream: ...

    async def reset_prefix_cache(
        self, *, reset_running_requests: bool, reset_external: bool, timeout_s: float
    ) -> ResetAnswer: ...

    async def metrics(self, *, timeout_s: float) -> str: ...

    async def pins(self, *, timeout_s: float) -> list[PinInfo]: ...

    async def unpin(self, pin_id: int, *, timeout_s: float) -> None: ...


class TextStream(Protocol):
    async def write(self, updates: Iterable[DetokenizeUpdate]) -> None: ...

    async def read(self) -> list[TextDelta] | None: ...

    def cancel(self) -> None: ...


class TextStreamApi(Protocol):
    """Raises PeerError."""

    async def text_stream(self, *, timeout_s: float) -> TextStream: ...


class PromptApi(Protocol):
    """Raises PeerError."""

    async def tokenize_text(
        self, text: str, *, add_special_tokens: bool = True, hashing: HashRequest | None = None
    ) -> TokenizedPrompt: ...

    async def tokenize_chat(
        self, chat: ChatPrompt, *, add_special_tokens: bool = False, hashing: HashRequest | None = None
    ) -> TokenizedPrompt: ...

    async def hash_tokens(
        self, token_ids: Sequence[int], hashing: HashRequest
    ) -> tuple[ProfileHashes, ...]: ...

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]: ...

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
