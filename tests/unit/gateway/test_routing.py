"""Least in flight, ties in turn."""

from collections import Counter

from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.ids import BlockHash
from reprise_gateway.routing import Candidate, LeastInFlight
from reprise_wire.clients.engine import EngineInfo
from reprise_wire.hash_profiles import HashProfile

INFO = EngineInfo(
    engine_id="e", model_name="m", model_path="/m", max_model_len=8, block_size=4, num_blocks=2,
    hash_profile=HashProfile("p", HashAlgorithm.SHA256, 4, BlockHash(bytes(32))), model_fingerprint="f",
    max_num_seqs=1, vocab_size=9, eos_token_ids=(), enable_prefix_caching=True, num_running=0,
    num_waiting=0, version="1",
)  # fmt: skip


def test_the_least_loaded_one_is_chosen() -> None:
    candidates = [Candidate("a", INFO, 3), Candidate("b", INFO, 1), Candidate("c", INFO, 2)]
    assert LeastInFlight().choose(candidates, [1]).address == "b"


def test_ties_go_round() -> None:
    router = LeastInFlight()
    candidates = [Candidate(name, INFO, 0) for name in "abc"]
    chosen = Counter(router.choose(candidates, [1]).address for _ in range(9))
    assert chosen == {"a": 3, "b": 3, "c": 3}
