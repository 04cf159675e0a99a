"""The candidates of a stitching job in its report: printed, drawn and weighed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fedquilt.api.run import Run
from fedquilt.cli import main
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError
from fedquilt.methods.fedstitch import METHOD, SearchParams
from fedquilt.models.stitching.search.candidates import board_cost
from fedquilt.testing.toy_networks import SMALL_SEARCH, build_donors, image_devices, run_method
from fedquilt.tools import report
from fedquilt.tools.lab import demo
from fedquilt.tools.report import run_data
from fedquilt.tools.simulation import agents


@cache
def result(**params: Any) -> dict[str, Any]:
    bundle, runner = build_donors()
    last = run_method(
        "fedstitch", bundle, image_devices(), {**SMALL_SEARCH, **params}, engine=runner, seed=3, rounds=1000
    )[-1]
    return dict(METHOD.result(last).meta)


def candidates(**params: Any) -> list[dict[str, Any]]:
    return list(result(**params)["search"])


def test_no_candidate_exceeds_a_budget() -> None:
    free, board = candidates(), "jetson-tx2"
    assert candidates(budget_mflop=1e9) == free

    def ms(each: dict[str, Any]) -> float:
        return board_cost(each["flops"], each["read_bytes"], board)[0] or 0.0

    amounts: dict[str, Callable[[dict[str, Any]], float]] = {
        "budget_mflop": lambda each: each["flops"] / 1e6,
        "budget_mb": lambda each: each["weight_bytes"] / 1e6,
        "budget_ms": ms,
        "budget_joules": lambda each: board_cost(each["flops"], each["read_bytes"], board)[1] or 0.0,
    }
    for name, amount in amounts.items():
        limit = max(map(amount, free)) / 2
        found = result(**{name: limit, "board": board})
        assert max(map(amount, found["search"])) <= limit
        assert [each["taps"] for each in found["search"] if each["chosen"]] == [found["taps"]]


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"budget_ms": 1.0}, "budget_ms has no board: name a profile"),
        ({"budget_joules": 1.0}, "budget_joules has no board"),
        ({"board": "jetson-tx9"}, "jetson-tx9"),
        ({"budget_mflop": 1e-9}, "budget_mflop = 1e-09 .cheapest .*: every donor exceeds the budget"),
        ({"budget_mb": 1e-9}, "budget_mb = 1e-09 .cheapest .*: every donor exceeds the budget"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(params: dict[str, Any], why: str) -> None:
    bundle, _ = build_donors()
    with pytest.raises(JobError, match=why):
        METHOD.init(bundle, SearchParams(**params), 0)


class Finished(NamedTuple):
    plan: agents.FleetPlan
    run: str
    folder: Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    pytest.importorskip("onnxruntime")
    from fedquilt.coordinator import settings

    job = settings.parse_job(
        {
            "name": "small",
            "method": "fedstitch",
            "rounds": 60,
            "params": {"subrounds": 1, "expansions": 2, "samples": 12, "fit_samples": 12, "head_samples": 24},
            "fleet": {"devices": 3, "boards": ["jetson-nano"]},
            "data": {"path": str(demo.HERE / "digits.npz"), "partition": "iid", "limit": 240},
        }
    )
    folder = tmp_path_factory.mktemp("finished")
    plan = agents.FleetPlan(job, demo.HERE / "bundle", folder / "home")
    run, status = agents.run_fleet_virtually(plan)
    assert status == "done"
    return Finished(plan, run, folder)


def test_the_report_prints_and_draws_the_front(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    plan, run, folder = finished
    capsys.readouterr()
    with Store(plan.home) as store:
        found = run_data.load_candidates(store, run)
        page = report.write_run_page(store, run, folder / "page.html").read_text()
    printed = capsys.readouterr().out
    assert "ms, jetson-nano" in printed
    assert (
        len(re.findall(r"\d  (?:front|chosen) ", printed)) == sum(each["front"] or each["chosen"] for each in found) > 0
    )
    for text in ("What the candidates cost", "MFLOP of one example", "ms, jetson-nano"):
        assert text in page
    assert page.count(" MFLOP</title>") == len(found)
    kinds = {each["kind"] for each in found}
    assert len(kinds) > 1
    assert all(f">{key}</text>" in page for key in (*kinds, "front (filled dots)"))  # the plot's legend


def test_every_candidate_is_exported_as_a_file_that_is_as_right_as_the_devices_counted(finished: Finished) -> None:
    from fedquilt.tools.artefacts.predictor import Predictor

    plan, run, folder = finished
    members, _ = plan.load_devices()
    held = [member.held_out for member in members]
    x, y = (np.concatenate(parts) for parts in zip(*((share.x, share.y) for share in held), strict=True))
    made = Run(plan.home, run)
    for number, told in enumerate(made.candidates(), 1):
        network = Predictor(made.export(folder / f"{number}.onnx", candidate=number))
        correct = network.compute_scores(network.prepare_inputs(x)).argmax(axis=1) == y
        assert (correct.sum(), len(y)) == (round(told["accuracy"] * len(y)), told["examples"])
    with pytest.raises(JobError, match="candidate 99 does not exist: the run has candidates 1 to"):
        made.export(folder / "none.onnx", candidate=99)
    assert (
        main(["model", "export", run, "--candidate", "0", "--out", str(folder / "0.onnx"), "--home", str(plan.home)])
        != 0
    )
