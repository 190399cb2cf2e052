"""Bodies that are no JSON object are refused with the place where it shows."""

import pytest

from reprise_gateway.body import parse_body
from reprise_gateway.errors import ApiError

JSON = "application/json"


def _refusal(raw: bytes, content_type: str = JSON) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(raw, content_type)
    assert (caught.value.status, caught.value.error_type) == (400, "Bad Request")
    return caught.value


@pytest.mark.parametrize("content_type", [JSON, "application/json; charset=utf-8", "application/vnd.x+json"])
def test_an_object(content_type: str) -> None:
    assert parse_body(b'{"a": [1, "\\u00e9"]}', content_type) == {"a": [1, "é"]}


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", "body"),
        (b"null", "body"),
        (b"[1]", "body"),
        (b'{"a": }', "body.6"),
        (b'{"a": "\xff"}', "body.7"),
        (b'{"a": {"b": ["x", "\\ud800"]}}', "body.a.b.1"),
        (b'{"\\udfff": 1}', "body"),
        (b'{"a": ' + b"1" * 5000 + b"}", "body"),
        (b"[" * 100_000, "body"),
        (b'{"a": "\\u0041", "b": ' + b"[" * 900 + b"]" * 900 + b"}", None),
    ],
)
def test_refusals(raw: bytes, param: str | None) -> None:
    error = _refusal(raw)
    assert param is None or error.param == param


def test_the_content_type_matters() -> None:
    assert _refusal(b"{}", "text/plain").param is None
    assert "text/plain" in str(_refusal(b"{}", "text/plain"))
    assert "''" in str(_refusal(b"{}", ""))
