"""Block hashes of a prompt under the profiles that a caller names."""

from collections.abc import Sequence

from reprise_core.errors import InvalidInput
from reprise_core.extra_keys import HashInputs
from reprise_core.hash_chain import BlockHasher
from reprise_wire.hash_profiles import HashProfile, HashRequest, ProfileHashes

_MAX_HASHERS = 64


class PromptHasher:
    """One pass over the prompt per distinct profile. Thread-safe.

    Hashers are kept by profile, up to a limit: engines with random seeds come and go.
    """

    def __init__(self, *, max_profiles: int) -> None:
        self._max_profiles = max_profiles
        self._hashers: dict[HashProfile, BlockHasher] = {}

    def hash(self, token_ids: Sequence[int], request: HashRequest) -> list[ProfileHashes]:
        profiles = dict.fromkeys(request.profiles)
        if len(profiles) > self._max_profiles:
            raise InvalidInput("profiles", f"{len(profiles)}, at most {self._max_profiles} are allowed")
        inputs = HashInputs(cache_salt=request.cache_salt, lora=request.lora)
        return [
            ProfileHashes(
                profile.profile_id,
                b"".join(self._hasher(profile).chain(inputs).append(token_ids, trusted=True)),
            )
            for profile in profiles
        ]

    def _hasher(self, profile: HashProfile) -> BlockHasher:
        hasher = self._hashers.get(profile)
        if hasher is None:
            hasher = profile.hasher()
            if len(self._hashers) >= _MAX_HASHERS:
                self._hashers.clear()
            self._hashers[profile] = hasher
        return hasher
