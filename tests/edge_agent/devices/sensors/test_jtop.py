"""jetson-stats as an optional meter: a module object made here stands for it, and nothing of it is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedquilt.core import Power
from fedquilt.edge_agent.devices import jetson_meters

TOLD = {
    "rail": {"VDD_SOC": {"power": 1500, "avg": 9}, "VDD_CPU_GPU_CV": {"power": 2000, "avg": 9}},
    "tot": {"power": 6000, "avg": 9, "name": "VDD_IN"},
}


class FakeClient:
    """As jtop's client behaves: a thread that hears from the service."""

    def __init__(self, power: Any = TOLD, *, alive: bool = True) -> None:
        self.power, self.alive = power, alive
        self.started = self.closed = False

    def start(self) -> None:
        self.started = True

    def ok(self, spin: bool = False) -> bool:
        assert spin  # otherwise it waits for the next message
        return self.alive

    def close(self) -> None:
        self.closed = True


def meter(client: FakeClient) -> jetson_meters.JtopMeter:
    found = jetson_meters.connect_jtop(lambda name: SimpleNamespace(jtop=lambda: client))
    assert found is not None
    assert client.started
    return found


def test_rails_and_total_are_watts_by_label():
    client = FakeClient()
    found = meter(client)
    rails = {"VDD_IN": 6.0, "VDD_SOC": 1.5, "VDD_CPU_GPU_CV": 2.0}
    assert found.read(0.0) == Power(6.0, "jtop VDD_IN", rails)
    found.close()
    assert client.closed


def test_a_total_without_a_rail_of_its_own_is_called_a_sum():
    power = {"rail": {"A": {"power": 1000}, "B": {"power": 500}}, "tot": {"power": 1500}}
    assert meter(FakeClient(power)).read(0.0) == Power(1.5, "jtop sum of A, B", {"A": 1.0, "B": 0.5})


@pytest.mark.parametrize(
    "client",
    [
        FakeClient(alive=False),
        FakeClient({"rail": {}, "tot": {"power": 0}}),
        FakeClient({}),
        FakeClient({"rail": {"A": {"power": "much"}}, "tot": {"power": 0}}),
        FakeClient(None),
    ],
)
def test_a_service_that_is_gone_or_tells_nothing_gives_no_power(client: FakeClient):
    """None, never 0, and no crash on figures of another shape."""
    assert meter(client).read(0.0) == Power()


def test_not_installed_is_no_meter():
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    assert jetson_meters.connect_jtop(absent) is None


def test_a_service_that_does_not_run_is_no_meter_and_is_logged(caplog: pytest.LogCaptureFixture):
    class Refuses(FakeClient):
        def start(self) -> None:
            raise Exception("The jtop.service is not active")

    assert jetson_meters.connect_jtop(lambda name: SimpleNamespace(jtop=Refuses)) is None
    assert "jtop.service is not active" in caplog.text
