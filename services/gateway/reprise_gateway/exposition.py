"""Several Prometheus texts as one: each family once, with the samples of all."""

from collections.abc import Iterable


class _Family:
    def __init__(self) -> None:
        self.head: dict[str, str] = {}
        self.samples: dict[str, str] = {}


def merge_expositions(texts: Iterable[str]) -> str:
    """The first text's help and type win; a series that comes twice is kept once."""
    families: dict[str, _Family] = {}
    for text in texts:
        current = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, name, *_ = line.split(" ", 3)
                current = name
                families.setdefault(name, _Family()).head.setdefault(kind, line)
            elif line and not line.startswith("#"):
                series = line[: line.rfind("}") + 1] or line.split(" ", 1)[0]
                families.setdefault(current, _Family()).samples.setdefault(series, line)
    lines: list[str] = []
    for family in families.values():
        lines += [*family.head.values(), *family.samples.values()]
    return "".join(line + "\n" for line in lines)
