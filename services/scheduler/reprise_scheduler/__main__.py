"""`python -m reprise_scheduler`."""

from reprise_runtime.service import run_service
from reprise_scheduler.app import SchedulerApp
from reprise_scheduler.settings import SchedulerSettings


def main() -> None:
    run_service(SchedulerSettings, SchedulerApp)


if __name__ == "__main__":
    main()
