"""Log-probabilities in step messages: they arrive as they were, and cost nothing where nobody asked."""

import msgspec

from reprise_core.steps import AddedRequest, RequestLogprobs, StepPlan, StepResult, WorkerSampling, pack_ids
from reprise_wire.step_codec import Body, Kind, decode_body, decode_header, encode


def there_and_back(kind: Kind, body: Body) -> Body:
    frames = encode(kind, body, session=b"s" * 16, step_id=1)
    return decode_body(decode_header(frames), frames, type(body))


def test_rows_arrive_as_they_were() -> None:
    rows = (RequestLogprobs(7, b"\x00\xff" * 8, b""), RequestLogprobs(9, b"", bytes(range(48))))
    result = StepResult(1, pack_ids([7]), pack_ids([4]), 0.5, 2, rows)
    assert there_and_back(Kind.RESULT, result) == result


def test_what_is_asked_for_arrives_and_zero_is_not_none() -> None:
    for counts in ((None, None), (0, None), (None, 0), (20, 3)):
        sampling = WorkerSampling(0.0, 1.0, 0, None, 0, b"", *counts)
        plan = StepPlan(1, added=(AddedRequest(1, pack_ids([3]), 1, 0, (pack_ids([1]),), sampling),))
        assert there_and_back(Kind.PLAN, plan) == plan


def test_a_result_that_nobody_asked_more_of_is_one_byte_longer() -> None:
    result = StepResult(1, pack_ids([7]), pack_ids([4]), 0.5)
    without = msgspec.msgpack.encode([getattr(result, name) for name in result.__struct_fields__[:5]])
    assert len(encode(Kind.RESULT, result, session=b"")[1]) == len(without) + 1
