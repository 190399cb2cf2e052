from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_EXTERNAL: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_HOST: Tier
TIER_DISK: Tier
TIER_EXTERNAL: Tier

class Keyspace(_message.Message):
    __slots__ = ("namespace", "fingerprint", "adapter", "tp_size")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    fingerprint: str
    adapter: str
    tp_size: int
    def __init__(self, namespace: _Optional[str] = ..., fingerprint: _Optional[str] = ..., adapter: _Optional[str] = ..., tp_size: _Optional[int] = ...) -> None: ...

class LookupBlocksRequest(_message.Message):
    __slots__ = ("keyspace", "group_ids", "block_hashes")
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    keyspace: Keyspace
    group_ids: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keyspace: _Optional[_Union[Keyspace, _Mapping]] = ..., group_ids: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LookupBlocksResponse(_message.Message):
    __slots__ = ("tiers", "generation")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    generation: int
    def __init__(self, tiers: _Optional[_Iterable[_Union[Tier, str]]] = ..., generation: _Optional[int] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("keyspace",)
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    keyspace: Keyspace
    def __init__(self, keyspace: _Optional[_Union[Keyspace, _Mapping]] = ...) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("keyspace", "block_hashes", "tiers")
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    keyspace: Keyspace
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    def __init__(self, keyspace: _Optional[_Union[Keyspace, _Mapping]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("host_bytes", "host_capacity_bytes", "host_blocks", "redis_connected", "loads", "saves", "dropped_saves", "disk_bytes", "disk_capacity_bytes", "disk_blocks")
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REDIS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_SAVES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    host_bytes: int
    host_capacity_bytes: int
    host_blocks: int
    redis_connected: bool
    loads: int
    saves: int
    dropped_saves: int
    disk_bytes: int
    disk_capacity_bytes: int
    disk_blocks: int
    def __init__(self, host_bytes: _Optional[int] = ..., host_capacity_bytes: _Optional[int] = ..., host_blocks: _Optional[int] = ..., redis_connected: _Optional[bool] = ..., loads: _Optional[int] = ..., saves: _Optional[int] = ..., dropped_saves: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_capacity_bytes: _Optional[int] = ..., disk_blocks: _Optional[int] = ...) -> None: ...

class WatchTiersRequest(_message.Message):
    __slots__ = ("keyspace", "adapters")
    KEYSPACE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    keyspace: Keyspace
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keyspace: _Optional[_Union[Keyspace, _Mapping]] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchTiersResponse(_message.Message):
    __slots__ = ("start", "changes")
    START_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    start: bool
    changes: _containers.RepeatedCompositeFieldContainer[TierBlocks]
    def __init__(self, start: _Optional[bool] = ..., changes: _Optional[_Iterable[_Union[TierBlocks, _Mapping]]] = ...) -> None: ...

class TierBlocks(_message.Message):
    __slots__ = ("tier", "group_id", "present", "block_hashes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    group_id: int
    present: bool
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., group_id: _Optional[int] = ..., present: _Optional[bool] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...
