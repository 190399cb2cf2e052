"""Run inside a new image: every module of its service imports, and nothing of another service is there.

python check_image.py SERVICE
"""

import importlib
import importlib.util
import pkgutil
import sys

SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "store", "publisher")
ONLY_IN_WORKER = ("torch", "transformers")


def main(service: str) -> int:
    package = importlib.import_module(f"reprise_{service}")
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for name in names:
        importlib.import_module(name)
    foreign = [f"reprise_{other}" for other in SERVICES if other != service]
    if service != "worker":
        foreign += ONLY_IN_WORKER
    found = [name for name in foreign if importlib.util.find_spec(name) is not None]
    if found:
        print(f"{service}: must not be in this image: {', '.join(found)}", file=sys.stderr)
        return 1
    print(f"{service}: {len(names)} modules import")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
