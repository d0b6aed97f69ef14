"""Where metrics listen."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

import transfer_queue as tq
from transfer_queue import config as settings

Service = Callable[..., tq.TransferQueueClient]
ON = {"enabled": True}


def listening(client: tq.TransferQueueClient, port: int) -> set[str]:
    """The addresses on which the server listens at `port`."""
    found = psutil.Process(client.stats()["pid"]).net_connections("inet")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", "0"])
def test_a_server_on_every_address_keeps_its_metrics_on_loopback(
    everywhere: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_TOKEN", "a-token-nobody-guesses")
    with pytest.warns(settings.ConfigWarning, match=rf"server\.host is {everywhere}: .* metrics\.host"):
        client = service(metrics=ON, server={"host": everywhere})
    host, _, port = (tq.get_metrics_endpoint() or "").rpartition(":")
    assert host == "127.0.0.1"
    assert listening(client, int(port)) == {"127.0.0.1"}


def test_metrics_are_on_every_address_when_that_is_asked_for(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_TOKEN", "a-token-nobody-guesses")
    client = service(metrics={"enabled": True, "host": "0.0.0.0"}, server={"host": "127.0.0.1"})
    port = int((tq.get_metrics_endpoint() or "").rpartition(":")[2])
    assert listening(client, port) == {"0.0.0.0"}


def test_metrics_are_where_the_server_is(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_TOKEN", "a-token-nobody-guesses")
    client = service(metrics=ON, server={"host": "127.0.0.2"})
    port = int((tq.get_metrics_endpoint() or "").rpartition(":")[2])
    assert listening(client, port) == {"127.0.0.2"}
