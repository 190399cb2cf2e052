"""One table from kinds of errors to gRPC codes and HTTP statuses, and back."""

import grpc

from reprise_core.errors import ErrorKind, RepriseError

GRPC_CODES: dict[ErrorKind, grpc.StatusCode] = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorKind.DATA_LOSS: grpc.StatusCode.DATA_LOSS,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
}
HTTP_STATUSES: dict[ErrorKind, int] = {
    ErrorKind.INVALID: 400,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.EXHAUSTED: 429,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.FAILED_PRECONDITION: 409,
    ErrorKind.DEADLINE: 504,
    ErrorKind.CANCELLED: 499,
    ErrorKind.DATA_LOSS: 502,
    ErrorKind.INTERNAL: 500,
}
_KINDS = {code: kind for kind, code in GRPC_CODES.items()}


class PeerError(RepriseError):
    """A failed call to another service, with the kind that the status code means."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> PeerError:
    """The peer's own words for errors that it made; `peer` names it where it could not answer."""
    kind = _KINDS.get(error.code(), ErrorKind.INTERNAL)
    details = error.details() or error.code().name
    if kind in (ErrorKind.UNAVAILABLE, ErrorKind.DEADLINE):
        return PeerError(kind, f"{peer}: {details}")
    return PeerError(kind, details)
