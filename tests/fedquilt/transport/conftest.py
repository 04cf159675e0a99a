"""Both brokers that the link is tried with."""

import logging

import pytest
from certified import Certified
from sealed_fleets import Fleet


@pytest.fixture(params=["mosquitto", "embedded_broker"])
def url(request: pytest.FixtureRequest) -> str:
    broker = request.getfixturevalue(request.param)
    return str(broker().url if request.param == "mosquitto" else broker.url)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return Certified(tmp_path_factory.mktemp("site"))


@pytest.fixture
def fleet(site: Certified, caplog: pytest.LogCaptureFixture) -> Fleet:
    caplog.set_level(logging.INFO, "fedquilt.security")
    made = Fleet(site)
    made.join("a")
    made.join("b")
    made.run()
    assert made.boards["a"].connected
    assert made.boards["b"].connected
    return made
