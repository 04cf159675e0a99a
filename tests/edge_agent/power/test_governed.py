"""The governor on simulated physics that is not its model, of two forms."""

from __future__ import annotations

import ast
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from fedquilt.core import WorkEstimate
from fedquilt.tools.lab.bench import governor_bench, physics, table_physics
from fedquilt.tools.lab.bench.governor_bench import LAWS

WORK = WorkEstimate(flops=1e12, read_bytes=3e10)


@pytest.fixture(scope="module", params=LAWS)
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Twenty tasks of each kind, on eight boards."""
    return [
        governor_bench.evaluate_case(case, range(8), 20, ("energy",))
        for case in governor_bench.create_cases(LAWS[request.param])
    ]


def test_after_ten_tasks_it_is_near_the_optimum_and_knows_time_and_power(rows: list[dict[str, Any]]) -> None:
    """Twelve recorded points, errors of 5 %: joules within 3 % of trying every point, time 10 %, power 6 %."""
    found = governor_bench.aggregate_rows(rows)
    assert found["above_optimum"] <= 3.0
    assert found["time_error"] <= 10.0
    assert found["power_error"] <= 6.0
    assert max(row["above_optimum_percent"]["energy"] for row in rows) <= 6.0


def test_no_more_than_one_task_in_fifty_is_late(rows: list[dict[str, Any]]) -> None:
    """From the third task on, also on a GPU of whose clock the profile knows nothing."""
    assert all(row["late_percent"]["energy"] <= 2.0 for row in rows)


def test_the_physics_that_judges_shares_no_code_with_what_is_judged() -> None:
    """Each file imports Python's own modules and the type of a task's work, and nothing else of fedquilt."""
    for module in (physics, table_physics):
        tree = ast.parse(Path(module.__file__).read_text())
        named = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        plain = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        ours = {(node.module, alias.name) for node in named for alias in node.names if "fedquilt" in str(node.module)}
        assert ours == {("fedquilt.core", "WorkEstimate")}
        assert {str(node.module).split(".")[0] for node in named} | set(plain) <= {"fedquilt", *sys.stdlib_module_names}
        assert all(node.level == 0 for node in named)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("engine", ["cpu", "cuda"])
def test_the_physics_that_judges_is_physics(law: governor_bench.PhysicsLaw, engine: physics.Engine) -> None:
    """Faster clocks are never slower, and a busy board draws more than an idle one."""
    for axis, steps in law.clock_lists().items():
        times = [law.seconds(WORK, engine, {**law.highest_clocks(), axis: hz}) for hz in steps]
        assert times == sorted(times, reverse=True)
        assert all(law.watts(WORK, engine, {**law.highest_clocks(), axis: hz}) > law.idle_w for hz in steps)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_energy_adds_over_time_and_idle_is_paid_while_waiting(law: governor_bench.PhysicsLaw) -> None:
    """Two halves of a task and the wait for its deadline cost what the whole costs."""
    case = governor_bench.GovernorCase("a", law, "cuda", "cuda", 0.03)
    whole, half = (governor_bench.GovernorJob(WORK.scale(share), 1e3 * share, 1.0, 1.0) for share in (1.0, 0.5))
    seconds, joules = governor_bench.time_and_energy(case, whole, law.highest_clocks())
    assert joules == pytest.approx(2 * governor_bench.time_and_energy(case, half, law.highest_clocks())[1])
    later = governor_bench.time_and_energy(
        case, governor_bench.GovernorJob(WORK, 1.1e3, 1.0, 1.0), law.highest_clocks()
    )
    assert later == (seconds, pytest.approx(joules + 100.0 * law.idle_w))


def test_the_optimum_is_in_time_and_no_policy_is_below_it_without_errors() -> None:
    """Every point is tried; the cheapest that meets the deadline is meant."""
    case = governor_bench.create_cases(LAWS["voltage floor"])[0]
    known = governor_bench.record_profile(case.law, case.recorded, random.Random(0))
    points, job = known.operating_points(), governor_bench.GovernorJob(WORK, 20.0, 1.0, 1.0)
    least = governor_bench.optimal_energy(case, points, job)
    for point in points:
        seconds, joules = governor_bench.time_and_energy(case, job, governor_bench.measurement.clocks_by_axis(point))
        assert seconds > job.left_s or joules >= least
