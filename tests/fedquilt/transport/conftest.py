"""Both brokers that the link is tried with."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["mosquitto", "embedded_broker"])
def url(request: pytest.FixtureRequest) -> str:
    """Each of the two brokers."""
    broker = request.getfixturevalue(request.param)
    return str(broker().url if request.param == "mosquitto" else broker.url)
