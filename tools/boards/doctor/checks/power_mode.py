"""Check of the power mode against the deadlines of the latest tasks."""

from __future__ import annotations

from pathlib import Path

from fedquilt import profiles
from fedquilt.core import FedquiltError
from fedquilt.edge_agent import agent_state
from fedquilt.edge_agent.clocks import controls, owner_limits
from fedquilt.edge_agent.clocks.controls import ClockControls, PowerMode, is_same_mode
from fedquilt.edge_agent.devices import linux
from fedquilt.edge_agent.power.learned_model import LatestTask, LearnedModel, estimate_points
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.tools.boards.doctor.findings import Problem, Verdict
from fedquilt.tools.boards.doctor.machine_facts import MachineFacts


def check_deadlines(settings: AgentSettings, machine: MachineFacts) -> Verdict:
    """Check that the power mode meets the latest deadlines, or return None without data.

    A task's work and the time that it had are the agent's own record, beside what it has learned of its speed.
    """
    levers = controls.discover_controls(machine.root)
    mode = next((each for each in levers.modes if is_same_mode(each.name, machine.mode)), None)
    if not machine.tegra or settings.board != "auto" or mode is None:
        return None
    try:
        board = (
            linux.find_profile(machine.root)
            if settings.profile is None
            else profiles.find_board_profile(settings.profile)
        )
        known = agent_state.read_learned_costs(Path(settings.home))
    except FedquiltError:  # the profile is FQ308's; of a home of another user nothing is known
        return None
    met = False
    for workload, learned in known.items():
        latest = learned.latest
        takes_s = (
            None
            if board is None or latest is None
            else _estimate_shortest_duration_s(board, levers, mode, learned, latest)
        )
        if board is None or latest is None or takes_s is None or latest.left_s <= 0:
            continue
        met = True
        if takes_s > latest.left_s:
            others = {
                each: _estimate_shortest_duration_s(board, levers, each, learned, latest) for each in levers.modes
            }
            enough = {each: told_s for each, told_s in others.items() if told_s is not None and told_s <= latest.left_s}
            return _describe_slow_mode(mode, workload, takes_s, latest.left_s, enough)
    return f"power mode {mode.name} is fast enough for the latest deadlines" if met else None


def _describe_slow_mode(
    mode: PowerMode, workload: str, takes_s: float, left_s: float, enough: dict[PowerMode, float]
) -> Problem:
    said = (
        f"in power mode {mode.name} the latest task ({workload}) takes {takes_s:.1f} s at the highest clocks that the "
        f"mode permits, and had {left_s:.1f} s until its deadline"
    )
    if not enough:
        return Problem(f"{said}; no mode is fast enough", "a longer deadline_s under [cohort] of the job")
    least = max(enough, key=lambda each: enough[each])  # the slowest one that will do draws the least
    return Problem(f"{said}; in {least.name} it takes {enough[least]:.1f} s", f"sudo nvpmodel -m {least.id}")


def _estimate_shortest_duration_s(
    board: profiles.BoardProfile, levers: ClockControls, mode: PowerMode, learned: LearnedModel, latest: LatestTask
) -> float | None:
    """Return the shortest time of the latest task at permitted points of a mode, or None if unknown."""
    most = owner_limits.permitted_hz(levers, owner_limits.control_limits(levers, mode))
    points = owner_limits.permitted_points(board.operating_points(), levers, mode, most)
    told = [each.seconds for each in estimate_points(learned, points, latest.work) if each is not None]
    return min(told, default=None)
