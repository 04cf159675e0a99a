"""Several meters of one board as one: the widest that answers is taken, in whatever order they are given."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fedquilt.core import Covers, Power
from fedquilt.edge_agent.devices.meters import PATIENCE_S, WidestRangeMeter


@dataclass
class Fixed:
    """A meter that always tells the same power; None: it is silent."""

    covers: Covers
    watts: float | None
    rails: dict[str, float] = field(default_factory=dict)

    def read(self, now_s: float) -> Power:
        return Power(self.watts, f"{self.covers} meter", self.rails)


def test_a_rail_is_told_beside_and_never_as_the_board() -> None:
    told = WidestRangeMeter([Fixed("rail", 5.0)]).read(0.0)
    assert (told.total_w, told.rails_w) == (None, {"rail meter": 5.0})


def test_a_narrower_meter_stands_in_only_when_the_wider_one_has_been_silent_for_a_while() -> None:
    """At once it would look as if the board took 15 W all of a sudden."""
    board = Fixed("board", 60.0)
    both = WidestRangeMeter([Fixed("processor", 15.0), board])
    both.read(0.0)
    board.watts = None
    assert both.read(PATIENCE_S).total_w is None
    assert both.read(PATIENCE_S + 0.1).total_w == 15.0


@pytest.mark.parametrize("watts", [-5.0, float("nan"), float("inf"), 1e9])
def test_watts_that_no_board_draws_are_unknown(watts: float) -> None:
    board = Fixed("board", watts)
    board.rails = {"a": watts, "b": 2.0}
    told = WidestRangeMeter([board]).read(0.0)
    assert (told.total_w, told.rails_w) == (None, {"b": 2.0})


def test_a_meter_that_holds_up_the_agent_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    passing = iter([0.0, 0.5, 10.0, 13.0, 20.0, 23.0])
    meters = WidestRangeMeter([Fixed("board", 5.0)], lambda: next(passing))
    meters.read(0.0)
    assert caplog.messages == []
    meters.read(1.0)
    assert meters.read(2.0).total_w == 5.0
    (said,) = caplog.messages
    assert "the meter Fixed took 3.0 s to answer" in said
    assert "docs/add-a-sensor.md" in said
