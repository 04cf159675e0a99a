"""Tasks carried out in the same process, on virtual time."""

from __future__ import annotations

import numpy as np
from children import Place

from fedquilt.core import Cost, WorkEstimate
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice
from fedquilt.edge_agent.task.protocol import DataLoaded, ProgressReport, WorkResult
from fedquilt.edge_agent.task.worker import InlineWorker
from fedquilt.profiles import load_board_profile


class TwoSpeeds(SimulatedDevice):
    """As fast as the test says."""

    flops_per_s = 2e9

    def __init__(self) -> None:
        super().__init__(load_board_profile("jetson-nano"))

    def task_cost(self, work: WorkEstimate, measured: Cost) -> Cost:
        return Cost(duration_s=work.flops / self.flops_per_s)


def test_inline_work_takes_as_long_as_it_would_on_the_board(place: Place) -> None:
    """1 GFLOP on a board of 2 GFLOP/s takes half a second; what is killed is not heard of."""
    worker = InlineWorker(TwoSpeeds())
    worker.start(place.order(), 50.0)
    assert worker.next_poll_s(50.0) == 50.0
    assert worker.poll_events(50.0) == [DataLoaded(8)]
    assert worker.next_poll_s(50.0) == 50.5
    assert worker.poll_events(np.nextafter(50.5, 0)) == []
    worker.kill()
    assert worker.poll_events(50.5) == []
    worker.start(place.order(), 60.0)
    worker.poll_events(60.0)
    assert [type(event) for event in worker.poll_events(60.5)] == [WorkResult]


def test_inline_work_goes_on_at_the_pace_of_the_point_it_is_held_at(place: Place) -> None:
    """40 GFLOP: 8 s at 2 GFLOP/s are 16 of them, and the other 24 take 6 s at 4 GFLOP/s."""
    board = TwoSpeeds()
    worker = InlineWorker(board)
    worker.start(place.order(work=WorkEstimate(flops=40e9)), 0.0)
    worker.poll_events(0.0)
    assert worker.next_poll_s(0.0) == 1.0
    assert worker.poll_events(8.0) == [ProgressReport(0.4)]
    board.flops_per_s = 4e9
    worker.next_poll_s(8.0)
    assert worker.poll_events(13.0) == [ProgressReport(0.9)]
    assert worker.poll_events(np.nextafter(14.0, 0)) == []
    assert [type(event) for event in worker.poll_events(14.0)] == [WorkResult]


def test_inline_work_that_fails_says_so_when_its_time_is_up(place: Place) -> None:
    worker = InlineWorker(TwoSpeeds())
    worker.start(place.order(data={}), 0.0)
    assert worker.poll_events(0.0) == []
    (outcome,) = worker.poll_events(worker.next_poll_s(0.0))
    assert isinstance(outcome, WorkResult)
    assert outcome.code == "data"
