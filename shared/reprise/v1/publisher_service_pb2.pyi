from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("topic", "events_endpoint", "replay_endpoint", "next_sequence", "replay_first_sequence", "dropped_batches", "complete", "record_blocks")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    EVENTS_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    RECORD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    events_endpoint: str
    replay_endpoint: str
    next_sequence: int
    replay_first_sequence: int
    dropped_batches: int
    complete: bool
    record_blocks: int
    def __init__(self, topic: _Optional[str] = ..., events_endpoint: _Optional[str] = ..., replay_endpoint: _Optional[str] = ..., next_sequence: _Optional[int] = ..., replay_first_sequence: _Optional[int] = ..., dropped_batches: _Optional[int] = ..., complete: _Optional[bool] = ..., record_blocks: _Optional[int] = ...) -> None: ...
