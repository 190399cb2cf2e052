"""What the worker keeps of each request between steps."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reprise_core.steps import AddedRequest, WorkerSampling, unpack_ids

Ids = npt.NDArray[np.int64]


class IdList:
    """A list of ids that grows at its end and is read as a numpy view, without copies."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._data: Ids = np.fromiter(ids, dtype=np.int64)
        self._size = len(self._data)

    def __len__(self) -> int:
        return self._size

    def extend(self, ids: list[int]) -> None:
        needed = self._size + len(ids)
        if needed > len(self._data):
            grown = np.zeros(max(64, 2 * needed), dtype=np.int64)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        self._data[self._size : needed] = ids
        self._size = needed

    @property
    def view(self) -> Ids:
        return self._data[: self._size]


@dataclass(slots=True)
class RequestState:
    """Invariants: every block id is in the pool; `tokens` has the prompt and all tokens drawn."""

    handle: int
    tokens: IdList
    num_prompt_tokens: int
    tables: list[IdList]
    """One per group."""
    sampling: WorkerSampling
    banned_token_ids: tuple[int, ...]
    seed: int
    """The request's own, or drawn here; noise for output token i is a function of (seed, i)."""
    adapter_id: int = 0
    """0 = none."""

    @classmethod
    def from_added(cls, added: AddedRequest) -> "RequestState":
        sampling = added.sampling
        return cls(
            handle=added.handle,
            tokens=IdList(unpack_ids(added.token_ids)),
            num_prompt_tokens=added.num_prompt_tokens,
            tables=[IdList(unpack_ids(table)) for table in added.block_ids],
            sampling=sampling,
            banned_token_ids=tuple(unpack_ids(sampling.banned_token_ids)),
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            adapter_id=added.adapter_id,
        )

    @classmethod
    def scratch(cls, *, tokens: IdList, blocks: IdList, adapter_id: int = 0) -> "RequestState":
        """A greedy request of ours, for trial runs over a cache of one group."""
        greedy = WorkerSampling(0.0, 1.0, 0, None)
        return cls(0, tokens, len(tokens), [blocks], greedy, (), 0, adapter_id)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens
