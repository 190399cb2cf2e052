"""What the compose file and the images say fits the services; needs no Docker engine."""

import pytest

from compose.deployed_settings import SERVICES, compose_services, image_environment, settings_of


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_starts_with_the_settings_of_the_compose_file(service: str) -> None:
    given = compose_services()[service]["environment"]
    settings = settings_of(service, image_environment(service) | {k: str(v) for k, v in given.items()})
    assert settings.service == service


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_listens_on_all_its_interfaces(service: str) -> None:
    listening = image_environment(service)
    assert f"REPRISE_{service.upper()}_METRICS_ADDRESS" in listening
    for name, address in listening.items():
        assert "0.0.0.0:" in address, name


def test_a_misspelt_setting_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of("store", {"REPRISE_STORE_CAPCITY_BYTES": "1"})
    assert "REPRISE_STORE_CAPCITY_BYTES" in capsys.readouterr().err


def test_ports_are_published_on_loopback_alone() -> None:
    ports = [port for service in compose_services().values() for port in service.get("ports", [])]
    assert len(ports) >= len(SERVICES) + 3
    assert all(port.startswith("127.0.0.1:") for port in ports), ports


def test_every_container_has_a_memory_limit_and_bounded_logs() -> None:
    for name, service in compose_services().items():
        assert service["mem_limit"], name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
