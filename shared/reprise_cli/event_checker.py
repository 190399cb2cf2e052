"""Whether a stream of KV events is consistent in itself; pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from reprise_core.block_encoding import BlockEncoder
from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import MM_TAG, SALT_TAG, ExtraKeys
from reprise_core.hash_algorithms import HashAlgorithm, external_hash
from reprise_core.ids import BlockHash
from reprise_core.kv_events import MEDIUM_DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, ExternalHash
from reprise_core.native_encoding import Encoding, make_encoder
from reprise_wire.event_facts import EventFacts
from reprise_wire.event_source_values import Delivery, DeliveryKind, Notice

MAX_OFFENDERS = 5
BAD_NOTICES = {"gap": "sequence gap", "malformed": "undecodable"}
"""Notices of the follower that are a fault of the stream."""


@dataclass(frozen=True, slots=True)
class Offender:
    sequence: int
    detail: str


@dataclass(slots=True)
class Problem:
    """One kind of fault: how often, and where first."""

    count: int = 0
    first: list[Offender] = field(default_factory=list)


class HashCheck:
    """Computes block hashes again, where parent, tokens and extra keys are all known.

    Not known: a parent that came before we listened, and what events leave out of the hash (an adapter's
    path, embeddings).
    """

    def __init__(self, algorithm: HashAlgorithm, none_hash: BlockHash, *, hash_block_size: int = 0) -> None:
        """`hash_block_size` in tokens; 0 = each event's block size."""
        if hash_block_size < 0:
            raise InvalidInput("hash_block_size", f"{hash_block_size}, must be at least 0")
        self._algorithm = algorithm
        self._none_hash = none_hash
        self._hash_block_size = hash_block_size
        self._encoders: dict[int, BlockEncoder] = {}
        self._digests: dict[ExternalHash, BlockHash] = {}
        """Of blocks that events name by 64 bits."""

    def expected(self, event: BlockStored) -> list[BlockHash] | None:
        """The hashes that the event's blocks must have; None where that cannot be told."""
        size = self._hash_block_size or event.block_size
        if size < 1 or event.block_size % size or not event.token_ids:
            return None
        ratio = event.block_size // size
        parent = self._parent(event.parent_block_hash)
        extras = _hashed_extras(event, ratio)
        if parent is None or extras == ():
            return None
        encoder = self._encoders.get(size)
        if encoder is None:
            encoder = self._encoders[size] = make_encoder(self._algorithm, size, Encoding.AUTO)
        num_hashes = len(event.block_hashes) * ratio
        hashes = encoder.hash_blocks(parent, list(event.token_ids), num_hashes, extras)[ratio - 1 :: ratio]
        for block_hash in hashes:
            self._digests[external_hash(block_hash)] = block_hash
        return hashes

    def forget(self, block_hash: ExternalHash) -> None:
        self._digests.pop(block_hash, None)

    def clear(self) -> None:
        self._digests.clear()

    def _parent(self, parent: ExternalHash | None) -> BlockHash | None:
        if parent is None:
            return self._none_hash
        return BlockHash(parent) if isinstance(parent, bytes) else self._digests.get(parent)


def _hashed_extras(event: BlockStored, ratio: int) -> Sequence[ExtraKeys | None] | None:
    """As they were hashed; None when no block has any, () where the event does not say."""
    if event.lora_name is not None:
        return ()
    keys = event.extra_keys
    if keys is None or not any(keys):
        return None
    if ratio != 1 or len(keys) != len(event.block_hashes):
        return ()
    tagged: list[ExtraKeys | None] = []
    for block_keys in keys:
        hashed: list[tuple[str, str, int] | tuple[str, str]] = []
        for key in block_keys or ():
            match key:
                case (str(identifier), int(offset)):
                    hashed.append((MM_TAG, identifier, offset))
                case str():
                    hashed.append((SALT_TAG, key))
                case _:
                    return ()
        tagged.append(tuple(hashed) or None)
    return tagged


class StreamChecker:
    """Takes what a follower delivers, in order, and keeps the faults it finds.

    What a source that is not exact cannot be blamed for (parents and removals of blocks from before we
    listened) is counted as not judged.
    """

    def __init__(self, hashes: HashCheck | None = None, *, limit_blocks: int = 4_000_000) -> None:
        self._hashes = hashes
        self._facts = EventFacts(limit_blocks=limit_blocks)
        self.problems: dict[str, Problem] = {}
        self.num_batches = 0
        self.num_events = 0
        self.num_hashes_checked = 0
        self.num_not_judged = 0

    @property
    def is_consistent(self) -> bool:
        return not self.problems

    def note(self, notice: Notice) -> None:
        kind = BAD_NOTICES.get(notice.kind)
        if kind is not None:
            at = notice.facts.get("sequence", notice.facts.get("last", -1))
            self._blame(kind, int(at), notice.text)

    def take(self, delivery: Delivery, *, is_whole: bool) -> None:
        """`is_whole`: everything that the source has was delivered before."""
        if delivery.kind is DeliveryKind.CLEARED:
            self._facts.apply(delivery)
            return
        self.num_batches += 1
        record = self._facts.record(delivery.source, delivery.batch.data_parallel_rank or 0)
        for place, event in enumerate(delivery.batch.events):
            self.num_events += 1
            if isinstance(event, BlockStored):
                is_told = is_whole and place not in delivery.unresolved
                self._check_stored(delivery, event, is_told)
            elif isinstance(event, BlockRemoved):
                self._check_removed(delivery, event, is_whole)
            elif self._hashes is not None:
                self._hashes.clear()
            if isinstance(event, AllBlocksCleared):
                is_whole = True
            record.apply(event)
            if isinstance(event, BlockRemoved) and self._hashes is not None:
                for block_hash in event.block_hashes:
                    if record.content(block_hash, event.group_idx) is None:
                        self._hashes.forget(block_hash)

    def _check_stored(self, delivery: Delivery, event: BlockStored, is_whole: bool) -> None:
        record = self._facts.record(delivery.source, delivery.batch.data_parallel_rank or 0)
        medium = event.medium or MEDIUM_DEVICE
        is_full = event.kv_cache_spec_kind in (None, "full_attention")
        bare = not event.token_ids and medium != MEDIUM_DEVICE
        num_tokens = len(event.block_hashes) * event.block_size
        if not event.block_hashes:
            self._blame("store of nothing", delivery.sequence, f"medium {medium}")
        if is_full and not bare and len(event.token_ids) != num_tokens:
            self._blame(
                "not dense",
                delivery.sequence,
                f"{len(event.block_hashes)} blocks of {event.block_size} with {len(event.token_ids)} tokens",
            )
            return
        parent = event.parent_block_hash
        if parent is not None and is_full and record.content(parent, event.group_idx) is None:
            self._blame_if(is_whole, "unknown parent", delivery.sequence, f"{_text(parent)}, {medium}")
        if bare:
            for block_hash in event.block_hashes:
                if record.content(block_hash, event.group_idx) is None:
                    self._blame_if(
                        is_whole, "store without tokens", delivery.sequence, f"unknown {_text(block_hash)}"
                    )
        elif is_full and self._hashes is not None:
            self._check_hashes(self._hashes, delivery.sequence, event)

    def _check_hashes(self, check: HashCheck, sequence: int, event: BlockStored) -> None:
        expected = check.expected(event)
        if expected is None:
            self.num_not_judged += len(event.block_hashes)
            return
        for told, digest in zip(event.block_hashes, expected, strict=True):
            self.num_hashes_checked += 1
            if told != (digest if isinstance(told, bytes) else external_hash(digest)):
                self._blame("wrong hash", sequence, f"{_text(told)}, computed {_text(external_hash(digest))}")

    def _check_removed(self, delivery: Delivery, event: BlockRemoved, is_whole: bool) -> None:
        record = self._facts.record(delivery.source, delivery.batch.data_parallel_rank or 0)
        for block_hash in event.block_hashes:
            if not record.copies(block_hash, event.group_idx, event.medium):
                medium = event.medium or MEDIUM_DEVICE
                self._blame_if(
                    is_whole, "unknown removal", delivery.sequence, f"{_text(block_hash)}, {medium}"
                )

    def _blame_if(self, judged: bool, kind: str, sequence: int, detail: str) -> None:
        if judged:
            self._blame(kind, sequence, detail)
        else:
            self.num_not_judged += 1

    def _blame(self, kind: str, sequence: int, detail: str) -> None:
        problem = self.problems.setdefault(kind, Problem())
        problem.count += 1
        if len(problem.first) < MAX_OFFENDERS:
            problem.first.append(Offender(sequence, detail))


def _text(block_hash: ExternalHash) -> str:
    return block_hash.hex() if isinstance(block_hash, bytes) else f"{block_hash:016x}"
