"""What can go wrong that is not our own mistake.

An error of the caller or of the world is a `RepriseError` with facts in fields; a broken
invariant of ours is an `assert`. `reprise_wire.error_codec` maps kinds to gRPC codes and HTTP
statuses, in one table.
"""

from enum import Enum


class ErrorKind(Enum):
    INVALID = "invalid"  # the caller's input; the message names field, value and what is allowed
    NOT_FOUND = "not_found"
    EXHAUSTED = "exhausted"  # a limit is reached; trying later may help
    UNAVAILABLE = "unavailable"  # a peer is away; trying again may help
    FAILED_PRECONDITION = "failed_precondition"  # the system is not in the right state
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    DATA_LOSS = "data_loss"  # bytes from outside are damaged
    INTERNAL = "internal"


class RepriseError(Exception):
    kind: ErrorKind = ErrorKind.INTERNAL
    retry_after_s: float = 0.0
    """Seconds after which another try may succeed; 0 = unknown."""


class InvalidInput(RepriseError):
    """A field of a request or setting that cannot be honoured."""

    kind = ErrorKind.INVALID

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class NotFound(RepriseError):
    kind = ErrorKind.NOT_FOUND


class Exhausted(RepriseError):
    kind = ErrorKind.EXHAUSTED


class Unavailable(RepriseError):
    kind = ErrorKind.UNAVAILABLE


class FailedPrecondition(RepriseError):
    kind = ErrorKind.FAILED_PRECONDITION


class DeadlineExceeded(RepriseError):
    kind = ErrorKind.DEADLINE


class DataLoss(RepriseError):
    kind = ErrorKind.DATA_LOSS
