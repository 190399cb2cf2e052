"""Starts the worker service."""

import os

from reprise_runtime.service import run_service
from reprise_runtime.settings import load_settings
from reprise_worker.settings import WorkerSettings


def main() -> None:
    # OpenMP reads this when torch is loaded; the app imports torch.
    os.environ.setdefault("GOMP_SPINCOUNT", str(load_settings(WorkerSettings).gomp_spincount))
    from reprise_worker.app import WorkerApp

    run_service(WorkerSettings, WorkerApp)


if __name__ == "__main__":
    main()
