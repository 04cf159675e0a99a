"""A power mode that is too slow for the deadlines of late is found, by what the agent has kept of its tasks."""

from __future__ import annotations

from typing import Any

import pytest

from fedquilt import profiles
from fedquilt.core import WorkEstimate
from fedquilt.edge_agent.agent_state import AgentState
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.devices import linux
from fedquilt.edge_agent.power.learned_model import LatestTask, LearnedModel, TaskSegment, learn_segment
from fedquilt.tools.boards.doctor import agent

WORK = WorkEstimate(flops=5e12, read_bytes=1e10, workload="torch-conv")


def in_mode(board: Any, name: str) -> None:
    (mode,) = [each for each in controls.discover_controls(board.root).modes if each.name == name]
    board.write("var/lib/nvpmodel/status", f"pmode:{mode.id:04d}")


def remembered(board: Any, left_s: float) -> None:
    point = next(each for each in profile(board).operating_points() if each.name == "7W")
    seen = TaskSegment(point, WORK, 2.0 * seconds(board, "7W"), None)
    learned = learn_segment(LearnedModel(), seen)
    assert learned.time is not None
    known = LearnedModel(time=learned.time, latest=LatestTask(work=WORK, time_left_s=left_s))
    AgentState(board.root / "var/lib/fedquilt").store_learned_costs({"torch fedavg": known})


def profile(board: Any) -> profiles.BoardProfile:
    found = linux.find_profile(board.root)
    assert found is not None
    return found


def seconds(board: Any, name: str) -> float:
    levers = controls.discover_controls(board.root)
    (mode,) = [each for each in levers.modes if each.name == name]
    told_s = agent._estimate_shortest_duration_s(
        profile(board), levers, mode, LearnedModel(), LatestTask(work=WORK, time_left_s=0.0)
    )
    assert told_s is not None
    return told_s


def findings(board: Any) -> list[tuple[str, str]]:
    return [(one.number, one.severity) for one in board.examine("machine")]


def test_a_mode_that_is_too_slow_is_named_with_one_that_would_do(board: Any) -> None:
    slow_s, fast_s = 2 * seconds(board, "7W"), 2 * seconds(board, "15W")
    assert fast_s < 30.0 < slow_s
    remembered(board, 30.0)
    in_mode(board, "7W")
    found = board.only()
    assert (found.number, found.severity, found.fix) == ("FQ162", "warning", "sudo nvpmodel -m 0")
    assert f"in power mode 7W the latest task (torch fedavg) takes {slow_s:.1f} s" in found.sentence
    assert f"had 30.0 s until its deadline; in 15W it takes {fast_s:.1f} s" in found.sentence
    in_mode(board, "15W")
    assert findings(board) == []


def test_a_deadline_that_no_mode_meets_is_the_jobs(board: Any) -> None:
    remembered(board, 5.0)
    in_mode(board, "7W")
    found = board.only()
    assert "no mode is fast enough" in found.sentence
    assert "deadline_s" in (found.fix or "")


@pytest.mark.parametrize("known", ["nothing", "no deadline", "damaged", "time enough"])
def test_without_a_deadline_that_was_too_short_nothing_is_found(board: Any, known: str) -> None:
    in_mode(board, "7W")
    if known != "nothing":
        remembered(board, 100.0 if known == "time enough" else -1.0 if known == "no deadline" else 5.0)
    if known == "damaged":
        (board.root / "var/lib/fedquilt/learned.json").write_text("{")
    assert findings(board) == []
