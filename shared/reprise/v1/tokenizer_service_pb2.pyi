from reprise.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenizerServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerServiceGetInfoResponse(_message.Message):
    __slots__ = ("model_name", "vocab_size", "has_chat_template", "eos_token_ids", "bos_token_id")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    vocab_size: int
    has_chat_template: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    def __init__(self, model_name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ...) -> None: ...

class HashRequest(_message.Message):
    __slots__ = ("profiles", "cache_salt", "lora")
    PROFILES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    profiles: _containers.RepeatedCompositeFieldContainer[_common_pb2.HashProfile]
    cache_salt: str
    lora: _common_pb2.LoraAdapter
    def __init__(self, profiles: _Optional[_Iterable[_Union[_common_pb2.HashProfile, _Mapping]]] = ..., cache_salt: _Optional[str] = ..., lora: _Optional[_Union[_common_pb2.LoraAdapter, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "add_special_tokens", "hash")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    add_special_tokens: bool
    hash: HashRequest
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., hash: _Optional[_Union[HashRequest, _Mapping]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages_json", "tools_json", "add_generation_prompt", "continue_final_message", "chat_template", "template_kwargs_json")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages_json: str
    tools_json: str
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str
    template_kwargs_json: str
    def __init__(self, messages_json: _Optional[str] = ..., tools_json: _Optional[str] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., chat_template: _Optional[str] = ..., template_kwargs_json: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "hashes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    hashes: _containers.RepeatedCompositeFieldContainer[_common_pb2.ProfileHashes]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., hashes: _Optional[_Iterable[_Union[_common_pb2.ProfileHashes, _Mapping]]] = ...) -> None: ...

class HashTokensRequest(_message.Message):
    __slots__ = ("token_ids", "hash")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    hash: HashRequest
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., hash: _Optional[_Union[HashRequest, _Mapping]] = ...) -> None: ...

class HashTokensResponse(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedCompositeFieldContainer[_common_pb2.ProfileHashes]
    def __init__(self, hashes: _Optional[_Iterable[_Union[_common_pb2.ProfileHashes, _Mapping]]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetTokenBytesRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetTokenBytesResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DetokenizeStreamRequest(_message.Message):
    __slots__ = ("updates",)
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[DetokenizeUpdate]
    def __init__(self, updates: _Optional[_Iterable[_Union[DetokenizeUpdate, _Mapping]]] = ...) -> None: ...

class DetokenizeUpdate(_message.Message):
    __slots__ = ("request_id", "open", "token_ids", "finish")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    open: DetokenizeOpen
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish: bool
    def __init__(self, request_id: _Optional[str] = ..., open: _Optional[_Union[DetokenizeOpen, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish: _Optional[bool] = ...) -> None: ...

class DetokenizeOpen(_message.Message):
    __slots__ = ("stop", "include_stop_in_text", "skip_special_tokens", "prompt_tail_ids", "min_tokens")
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_IN_TEXT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TAIL_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_in_text: bool
    skip_special_tokens: bool
    prompt_tail_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    def __init__(self, stop: _Optional[_Iterable[str]] = ..., include_stop_in_text: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., prompt_tail_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class DetokenizeStreamResponse(_message.Message):
    __slots__ = ("deltas",)
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[TextDelta]
    def __init__(self, deltas: _Optional[_Iterable[_Union[TextDelta, _Mapping]]] = ...) -> None: ...

class TextDelta(_message.Message):
    __slots__ = ("request_id", "text", "num_tokens", "matched_stop", "finished")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    num_tokens: int
    matched_stop: str
    finished: bool
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., num_tokens: _Optional[int] = ..., matched_stop: _Optional[str] = ..., finished: _Optional[bool] = ...) -> None: ...
