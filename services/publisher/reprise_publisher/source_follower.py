"""Follows a source of events and makes whole what was lost of it, by asking for its state."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from reprise_publisher.metrics import PublisherMetrics
from reprise_publisher.numbering import Arrival, SourceNumbering
from reprise_publisher.stream import PublishedStream
from reprise_wire.event_intake import (
    RequestKind,
    SourceHeader,
    SourceKind,
    parse_source_message,
    request_frames,
)

MAX_ATTEMPTS = 3
"""States asked for in a row before the loss is accepted."""
RETRY_S = 10.0
"""How long after a loss was accepted a source that says hello is asked again."""

Ask = Callable[[bytes, list[bytes]], None]
"""Identity and frames; never waits, and what cannot be sent is lost."""


@dataclass(frozen=True, slots=True)
class FollowerLimits:
    state_timeout_s: float
    """Without an answer, or the next chunk of it, for so long, the loss is accepted."""
    hold_bytes: int
    """Live batches that wait for a state; beyond it they are dropped and the state is asked for again."""


@dataclass
class _Held:
    sequence: int
    payload: bytes


@dataclass
class _Question:
    """A state that is wanted, or on its way."""

    state_id: int
    deadline_s: float
    attempt: int
    next_index: int = 0
    through: int = 0
    """The first batch that the state does not contain; known from the first chunk on."""
    held: deque[_Held] = field(default_factory=deque)
    num_bytes: int = 0


class SourceFollower:
    """Live batches are published as they come. Where some are missing (a hole in the numbers, or a source
    that was there before this publisher) the state is asked for, live batches are held, and then go out:
    cleared, the state, the held ones that it does not contain.

    A source that does not answer is followed all the same: cleared, then the live batches, and the
    stream is not complete until the source says that it is cleared. It is asked again only if it says
    hello, which is for sources that answer.
    """

    def __init__(
        self, stream: PublishedStream, ask: Ask, limits: FollowerLimits, metrics: PublisherMetrics
    ) -> None:
        self._stream = stream
        self._ask = ask
        self._limits = limits
        self._metrics = metrics
        self._numbering = SourceNumbering()
        self._identity = b""
        self._says_hello = False
        self._answers = True
        """Until it has not."""
        self._question: _Question | None = None
        self._last_state_id = 0
        self._must_contain = 0
        """A state must have all batches before this one to make up for what was lost."""
        self._unseen = 0
        """Batches before this publisher's time: a gap, unless a state brings what they did."""
        self._retry_s: float | None = None
        """When a source that did not answer is asked again, if it says hello."""

    def start(self) -> None:
        """Nothing is known before a source has said something."""
        self._stream.cleared()
        self._stream.knows_all = False

    @property
    def deadline_s(self) -> float | None:
        """When `advance` has something to do."""
        return self._question.deadline_s if self._question is not None else None

    @property
    def num_held_bytes(self) -> int:
        return self._question.num_bytes if self._question is not None else 0

    def take_in(self, identity: bytes, frames: list[bytes], *, now_s: float) -> None:
        """One message of a source. Raises DataLoss, with nothing changed, for one that is malformed: its
        number then shows as a gap before the next batch."""
        message = parse_source_message(frames)
        header = message.header
        if header.kind is SourceKind.STATE:
            self._take_state(header, message.payload, now_s)
            return
        arrival = self._numbering.arrive(header)
        if arrival.replaced:
            self._metrics.replaced.inc()
            return
        if arrival.duplicate:
            self._metrics.duplicates.inc(header.kind is SourceKind.BATCH)
            return
        self._identity = identity
        self._account(arrival, header, now_s)
        if header.kind is SourceKind.BATCH:
            self._take_batch(header.sequence, message.payload, now_s)
        else:
            self._says_hello = True
            if self._retry_s is not None and now_s >= self._retry_s:
                self._must_contain = header.sequence
                self._start_question(now_s)

    def advance(self, *, now_s: float) -> None:
        """Asks for a state when a batch turned out to be damaged, and accepts a loss when time is up."""
        if self._stream.damaged and self._question is None:
            self._must_contain = self._numbering.next
            self._make_up(now_s)
        if self._question is not None and now_s >= self._question.deadline_s:
            self._answers = False
            self._accept_loss(now_s)

    def _account(self, arrival: Arrival, header: SourceHeader, now_s: float) -> None:
        if arrival.new_epoch:
            self._question, self._retry_s = None, None
            self._says_hello, self._answers = False, True
            self._unseen = arrival.gap
            if not arrival.first:
                self._metrics.epochs.inc()
                self._stream.cleared()
            self._stream.knows_all = True
        elif arrival.gap:
            self._stream.skip(arrival.gap)
        if arrival.gap:
            self._must_contain = header.sequence
            self._make_up(now_s)

    def _make_up(self, now_s: float) -> None:
        question = self._question
        if question is None:
            if self._answers or self._says_hello:
                self._start_question(now_s)
            else:
                self._accept_loss(now_s)
        elif question.next_index and question.through < self._must_contain:
            self._ask_again(now_s)

    def _take_batch(self, sequence: int, payload: bytes, now_s: float) -> None:
        question = self._question
        if question is None:
            self._stream.publish("events", payload)
            return
        question.held.append(_Held(sequence, payload))
        question.num_bytes += len(payload)
        if question.num_bytes > self._limits.hold_bytes:
            self._metrics.held_dropped.inc(len(question.held))
            self._must_contain = self._numbering.next
            self._ask_again(now_s)

    # -- the state --------------------------------------------------------------------------------

    def _start_question(self, now_s: float, *, attempt: int = 1) -> None:
        self._last_state_id += 1
        deadline_s = now_s + self._limits.state_timeout_s
        self._question = _Question(self._last_state_id, deadline_s, attempt)
        self._retry_s = None
        self._stream.knows_all = False
        self._metrics.states.labels("asked").inc()
        self._request(RequestKind.WANT_STATE, 0)

    def _ask_again(self, now_s: float) -> None:
        """What is held is older than the state that comes, so it goes."""
        assert self._question is not None
        attempt = self._question.attempt + 1
        if attempt > MAX_ATTEMPTS:
            self._accept_loss(now_s)
        else:
            self._start_question(now_s, attempt=attempt)

    def _take_state(self, header: SourceHeader, payload: bytes, now_s: float) -> None:
        question, chunk = self._question, header.state
        assert chunk is not None
        if (
            question is None
            or header.epoch != self._numbering.epoch
            or (chunk.state_id, chunk.index) != (question.state_id, question.next_index)
        ):
            self._metrics.states.labels("stray_chunk").inc()
            return
        if chunk.index == 0 and not self._begin_state(question, header, now_s):
            return
        self._stream.publish("state", payload)
        self._request(RequestKind.STATE_ACK, chunk.index)
        question.next_index += 1
        question.deadline_s = now_s + self._limits.state_timeout_s
        if chunk.last:
            self._end_state(question, complete=chunk.complete)

    def _begin_state(self, question: _Question, header: SourceHeader, now_s: float) -> bool:
        """False when the state is older than the last loss, so that another one must come."""
        arrival = self._numbering.arrive(header)
        if arrival.gap:
            # Lost, and contained in this state.
            self._stream.skip(arrival.gap)
        if header.sequence < self._must_contain:
            self._ask_again(now_s)
            return False
        question.through = header.sequence
        while question.held and question.held[0].sequence < header.sequence:
            question.num_bytes -= len(question.held.popleft().payload)
        self._unseen = 0
        self._stream.cleared()
        return True

    def _end_state(self, question: _Question, *, complete: bool) -> None:
        self._question = None
        self._metrics.states.labels("received").inc()
        self._stream.knows_all = complete
        for held in question.held:
            self._stream.publish("events", held.payload)

    def _accept_loss(self, now_s: float) -> None:
        question, self._question = self._question, None
        self._retry_s = now_s + RETRY_S
        self._metrics.states.labels("given_up").inc()
        self._stream.skip(self._unseen)
        self._unseen = 0
        self._stream.cleared()
        self._stream.knows_all = False
        for held in question.held if question is not None else ():
            self._stream.publish("events", held.payload)

    def _request(self, kind: RequestKind, index: int) -> None:
        assert self._numbering.epoch is not None
        self._ask(self._identity, request_frames(kind, self._numbering.epoch, self._last_state_id, index))
