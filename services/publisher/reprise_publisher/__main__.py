"""`reprise-publisher`: the event publisher service."""

from reprise_publisher.app import PublisherApp
from reprise_publisher.settings import PublisherSettings
from reprise_runtime.service import run_service


def main() -> None:
    run_service(PublisherSettings, PublisherApp)


if __name__ == "__main__":
    main()
