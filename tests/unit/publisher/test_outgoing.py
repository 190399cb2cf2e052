"""What leaves the publisher when something must not."""

import hmac
from hashlib import sha256
from typing import Any

import pytest

from reprise_core.errors import DataLoss
from reprise_core.extra_keys import HashInputs, LoraAdapter, MmItem, PromptEmbeds, event_extra_keys
from reprise_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from reprise_publisher.outgoing import Outgoing, OutgoingOptions, salt_digest, salt_key, salt_position
from reprise_wire.event_codec import EventForm, decode_batch, encode_batch

KEY = b"secret"
REMOVED = BlockRemoved(block_hashes=(7,), medium="GPU")


def stored(**changes: Any) -> BlockStored:
    fields: dict[str, Any] = {
        "block_hashes": (1, 2),
        "parent_block_hash": None,
        "token_ids": (1, 2, 3, 4),
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return BlockStored(**{**fields, **changes})


def batch(*events: KvEvent) -> KvEventBatch:
    return KvEventBatch(1.5, events, 3)


def sent(options: OutgoingOptions, *events: KvEvent) -> tuple[KvEvent, ...]:
    """What a subscriber decodes."""
    decoded = decode_batch(Outgoing(options).payload(encode_batch(batch(*events))))
    assert (decoded.ts, decoded.data_parallel_rank) == (1.5, 3)
    return decoded.events


def test_nothing_to_change_passes_the_bytes_through_unread() -> None:
    payload = b"\x93not even a batch"
    assert Outgoing(OutgoingOptions()).payload(payload) is payload


def test_token_ids_are_left_out() -> None:
    event = stored(lookahead_token_ids=((5,), (6,)))
    assert sent(OutgoingOptions(token_ids=False), event, REMOVED, AllBlocksCleared()) == (
        stored(token_ids=()),
        REMOVED,
        AllBlocksCleared(),
    )


def test_a_salt_becomes_its_keyed_digest() -> None:
    event = stored(extra_keys=(("my salt",), None))
    digest = hmac.new(KEY, b"my salt", sha256).hexdigest()
    (out,) = sent(OutgoingOptions(salt_key=KEY), event)
    assert out == stored(extra_keys=((digest,), None))
    assert b"my salt" not in encode_batch(batch(out))


def test_only_the_salt_changes_among_all_kinds_of_keys() -> None:
    inputs = HashInputs(
        lora=LoraAdapter("adapter", 1, "/path"),
        mm=(MmItem("image", 0, 3),),
        cache_salt="salt",
        prompt_embeds=PromptEmbeds("f", (4, 1), b"\x00" * 16),
    )
    keys = event_extra_keys(inputs, block_size=2, first_block=0, num_blocks=2)
    assert keys is not None
    (out,) = sent(OutgoingOptions(salt_key=KEY), stored(extra_keys=keys, lora_name="adapter", lora_id=1))
    assert isinstance(out, BlockStored)
    assert out.extra_keys is not None
    first = list(keys[0] or ())
    assert first[2] == "salt"
    first[2] = salt_digest("salt", KEY)
    assert out.extra_keys == (tuple(first), keys[1])


def test_a_salt_that_equals_the_adapters_name_is_still_a_salt() -> None:
    keys = (("name", "name"), ("name",))
    (out,) = sent(OutgoingOptions(salt_key=KEY), stored(extra_keys=keys, lora_name="name"))
    assert isinstance(out, BlockStored)
    assert out.extra_keys == (("name", salt_digest("name", KEY)), ("name",))


def test_a_name_where_no_adapter_is_counts_as_a_salt() -> None:
    """Better one digest too many than a salt that leaves."""
    (out,) = sent(OutgoingOptions(salt_key=KEY), stored(extra_keys=(("a", "b"), None)))
    assert isinstance(out, BlockStored)
    assert out.extra_keys == ((salt_digest("a", KEY), salt_digest("b", KEY)), None)


@pytest.mark.parametrize(
    ("keys", "lora_name", "position"),
    [
        (None, None, None),
        ((), None, None),
        (("salt",), None, 0),
        (("adapter",), "adapter", None),
        (("adapter", "salt"), "adapter", 1),
        ((("image", 0), "salt", b"digest"), None, 1),
        ((("image", 0), b"digest"), None, None),
    ],
)
def test_where_the_salt_stands(
    keys: tuple[Any, ...] | None, lora_name: str | None, position: int | None
) -> None:
    assert salt_position(keys, lora_name) == position


@pytest.mark.parametrize("form", list(EventForm))
def test_the_form_is_the_one_asked_for(form: EventForm) -> None:
    events = (stored(), REMOVED, AllBlocksCleared())
    outgoing = Outgoing(OutgoingOptions(form=form))
    payload = outgoing.payload(encode_batch(batch(*events)))
    assert payload == encode_batch(batch(*events), form=form)
    assert decode_batch(payload).events == events
    assert outgoing.passes_through is (form is EventForm.MAP)


def test_what_is_to_be_changed_and_is_no_batch_is_refused() -> None:
    with pytest.raises(DataLoss):
        Outgoing(OutgoingOptions(token_ids=False)).payload(b"\x93\x01\x02\x03")


def test_a_random_key_is_another_one_each_time() -> None:
    assert salt_key("given") == b"given"
    assert salt_key("") != salt_key("")
    assert len(salt_key("")) == 32
