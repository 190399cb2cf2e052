"""Bytes of a request body to a JSON object."""

import json
from typing import Any

from reprise_gateway.errors import bad_shape

_MAX_DEPTH = 200


def parse_body(raw: bytes, content_type: str) -> dict[str, Any]:
    """Raises a 400 that says what is wrong and where."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise bad_shape(None, f"Content-Type: {content_type!r}, must be application/json")
    value = _parse_json(raw)
    if not isinstance(value, dict):
        kind = "nothing" if value is None else type(value).__name__
        raise bad_shape("body", f"body: {kind}, must be a JSON object")
    if b"\\u" in raw:
        _refuse_surrogates(value, "body", 0)
    return value


def _parse_json(raw: bytes) -> Any:
    if not raw.strip():
        return None
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise bad_shape(
            f"body.{error.start}", f"body: byte {error.start} is not valid UTF-8: {error.reason}"
        ) from error
    except json.JSONDecodeError as error:
        raise bad_shape(f"body.{error.pos}", f"body: malformed JSON at {error.pos}: {error.msg}") from error
    except RecursionError as error:
        raise bad_shape("body", "body: nested too deeply") from error
    except ValueError as error:
        raise bad_shape("body", f"body: {error}") from error


def _refuse_surrogates(value: Any, place: str, depth: int) -> None:
    """A lone surrogate is JSON's way to write text that no UTF-8 can carry."""
    if depth > _MAX_DEPTH:
        raise bad_shape(place, f"{place}: nested too deeply")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad_shape(place, f"{place}: holds a lone surrogate, must be valid Unicode") from None
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _refuse_surrogates(item, f"{place}.{i}", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key, place, depth + 1)
            _refuse_surrogates(item, f"{place}.{key}", depth + 1)
