"""`reprise-gateway`: OpenAI-compatible HTTP in front of engines."""

import uvloop

from reprise_gateway.app import GatewayApp
from reprise_gateway.settings import GatewaySettings
from reprise_runtime.service import run_service


def main() -> None:
    uvloop.install()
    run_service(GatewaySettings, GatewayApp)


if __name__ == "__main__":
    main()
