"""Errors as OpenAI clients expect them: {"error": {"message", "type", "param", "code"}}."""

from typing import Any

from reprise_core.errors import RepriseError
from reprise_wire.error_codec import HTTP_STATUSES

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    499: "ClientClosedRequestError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


class ApiError(Exception):
    """An answer to the client. `param` names the field; `retry_after_s` becomes a header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        error_type: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.error_type = error_type or _TYPES.get(status, "InternalServerError")
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": self.error_type,
                "param": self.param,
                "code": self.status,
            }
        }


def bad_rule(param: str | None, message: str) -> ApiError:
    """A value that is well-formed and not allowed; `param` is the field's name."""
    return ApiError(400, message, param=param)


def bad_shape(place: str | None, message: str) -> ApiError:
    """A body that does not fit the schema; `place` is dotted, such as `body.max_tokens`."""
    return ApiError(400, message, param=place, error_type="Bad Request")


def unknown_model(name: str, known: list[str]) -> ApiError:
    served = ", ".join(known)
    return ApiError(404, f"model: {name!r} does not exist; served here: {served}", param="model")


def deadline_exceeded(timeout_s: float) -> ApiError:
    return ApiError(504, f"not finished within {timeout_s:g} s")


def from_reprise_error(error: RepriseError, *, retry_after_s: float = 0.0) -> ApiError:
    status = HTTP_STATUSES[error.kind]
    retry_after_s = retry_after_s or error.retry_after_s
    if status in (429, 503) and not retry_after_s:
        retry_after_s = 1.0
    return ApiError(status, str(error), retry_after_s=retry_after_s)
