"""Settings of the tokenizer service, from REPRISE_TOKENIZER_*."""

from typing import ClassVar

from pydantic import Field

from reprise_runtime import tracing
from reprise_runtime.settings import settings_config

KIB = 1024
MIB = 1024 * KIB


class TokenizerSettings(tracing.TracedSettings):
    model_config = settings_config("tokenizer")
    service: ClassVar[str] = "tokenizer"

    listen_address: str = "127.0.0.1:50051"
    metrics_address: str = "127.0.0.1:9202"
    model_path: str
    """Folder with tokenizer.json, and tokenizer_config.json or chat_template.jinja beside it."""
    model_name: str = ""
    """The name that clients ask for; empty = the folder's name."""
    work_threads: int = Field(default=2, ge=1)
    """Threads that render, tokenize and hash; tokenizing does not hold the GIL."""
    work_queue_calls: int = Field(default=256, ge=1)
    """Calls that wait for a thread; one more is refused as exhausted."""
    max_stream_requests: int = Field(default=4096, ge=1)
    """Requests of one detokenizing stream; one more ends the stream as exhausted."""
    max_profiles: int = Field(default=16, ge=1)
    """Hash profiles in one call: each is a pass over the prompt."""
    max_template_bytes: int = Field(default=256 * KIB, ge=1)
    """Size of a chat template, the model's or a caller's."""
    max_rendered_bytes: int = Field(default=16 * MIB, ge=1)
    """Size of a rendered conversation."""
    any_role: bool = False
    """Leave message roles to the template, as the reference does; off, a role that is neither
    standard nor named in the template is refused."""
    template_timeout_s: float = Field(default=5.0, gt=0)
    """Time that a chat template may take to render."""
