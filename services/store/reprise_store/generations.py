"""Which generation each scope is at, as far as this store knows."""

from collections import OrderedDict
from collections.abc import Callable

from reprise_store.keys import Scope

MAX_SCOPES = 4096
"""Models seen; the longest unused one is forgotten and asked for again."""


class Generations:
    """Known generations, and provisional ones made up while nobody could be asked.

    A provisional generation was never anybody else's, so it may become the real one where there is none
    yet. A real one that got lost must not come back: resets that this store has not seen may lie between.
    """

    def __init__(self, draw: Callable[[], int]) -> None:
        self._draw = draw
        self._known: OrderedDict[Scope, int] = OrderedDict()
        self._provisional: set[Scope] = set()

    def get(self, scope: Scope) -> int | None:
        return self._known.get(scope)

    def provisional(self, scope: Scope) -> int:
        """The known generation, else one made up now."""
        if scope not in self._known:
            self._provisional.add(scope)
            self._remember(scope, self._draw())
        return self._known[scope]

    def proposal(self, scope: Scope) -> int:
        """What to begin with if nobody has a generation for the scope."""
        return self._known[scope] if scope in self._provisional else self._draw()

    def learn(self, scope: Scope, generation: int) -> bool:
        """True when the scope was known at another generation."""
        before = self._known.get(scope)
        self._provisional.discard(scope)
        self._remember(scope, generation)
        return before is not None and before != generation

    def _remember(self, scope: Scope, generation: int) -> None:
        self._known[scope] = generation
        self._known.move_to_end(scope)
        if len(self._known) > MAX_SCOPES:
            forgotten, _ = self._known.popitem(last=False)
            self._provisional.discard(forgotten)
