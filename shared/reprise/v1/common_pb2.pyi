from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class HashProfile(_message.Message):
    __slots__ = ("id", "algorithm", "hash_block_size", "none_hash")
    ID_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NONE_HASH_FIELD_NUMBER: _ClassVar[int]
    id: str
    algorithm: str
    hash_block_size: int
    none_hash: bytes
    def __init__(self, id: _Optional[str] = ..., algorithm: _Optional[str] = ..., hash_block_size: _Optional[int] = ..., none_hash: _Optional[bytes] = ...) -> None: ...

class LoraAdapter(_message.Message):
    __slots__ = ("name", "int_id", "path", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INT_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    int_id: int
    path: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., int_id: _Optional[int] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class ProfileHashes(_message.Message):
    __slots__ = ("profile_id", "digests")
    PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    profile_id: str
    digests: bytes
    def __init__(self, profile_id: _Optional[str] = ..., digests: _Optional[bytes] = ...) -> None: ...
