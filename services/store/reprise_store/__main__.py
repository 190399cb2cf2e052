"""`reprise-store`: the KV-offload store service."""

import uvloop

from reprise_runtime.service import run_service
from reprise_store.app import StoreApp
from reprise_store.settings import StoreSettings


def main() -> None:
    uvloop.install()
    run_service(StoreSettings, StoreApp)


if __name__ == "__main__":
    main()
