"""Python's cycle collector, kept from pausing a loop whose every millisecond somebody waits for.

A full collection visits every container of the process: for a pool of 200 000 blocks that takes 50 ms,
and with 256 running requests one came every hundred steps.
"""

import gc

YOUNG_OBJECTS = 20_000
"""Containers made and not freed before the collector looks; more than a step of many requests makes."""


def spare_long_lived() -> None:
    """What exists now is never visited again, until the next call. To be called when it was built.

    Its own cycles are not found either: whoever replaces it calls again, which frees the old one.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
