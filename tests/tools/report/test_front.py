"""The candidates of a stitching job in its report: printed, drawn and weighed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError
from fedquilt.methods.fedstitch import METHOD, SearchParams
from fedquilt.testing.toy_networks import SMALL, build_donors, image_members, run_method
from fedquilt.tools import report
from fedquilt.tools.lab import demo
from fedquilt.tools.report import candidate_costs
from fedquilt.tools.simulation import agents


@cache
def result(**params: Any) -> dict[str, Any]:
    """What a search with these parameters comes to."""
    bundle, runner = build_donors()
    last = run_method("fedstitch", bundle, image_members(), {**SMALL, **params}, engine=runner, seed=3, rounds=1000)[-1]
    return dict(METHOD.result(last).meta)


def candidates() -> list[dict[str, Any]]:
    return list(result()["search"])


def chosen(**params: Any) -> dict[str, Any]:
    found = result(**params)
    return next(each for each in found["search"] if each["taps"] == found["taps"])


def test_every_candidate_has_its_costs_and_the_most_accurate_is_on_the_front() -> None:
    """The cheapest is there too; several taps are joined in one candidate at least."""
    found = candidates()
    assert all(each["flops"] > 0 and each["weight_bytes"] > 0 and each["read_bytes"] > 0 for each in found)
    best = [each for each in found if each["front"]]
    assert max(each["accuracy"] for each in best) == max(each["accuracy"] for each in found)
    assert min(each["flops"] for each in best) == min(each["flops"] for each in found)
    assert [each["kind"] for each in found].count("joined") >= 1


def test_a_price_makes_the_job_choose_a_cheaper_network() -> None:
    """Free: the most accurate. At 1,000 points for each FLOP: the cheapest. A board is needed for milliseconds."""
    dear, cheap = chosen(), chosen(price_mflop=1e9)
    every = candidates()
    assert dear["accuracy"] == max(each["accuracy"] for each in every)
    assert cheap["flops"] == min(each["flops"] for each in every) < dear["flops"]
    assert chosen(price_ms=1e9, board="jetson-tx2")["read_bytes"] <= dear["read_bytes"]
    bundle, _ = build_donors()
    with pytest.raises(JobError, match="say of which board"):
        METHOD.init(bundle, SearchParams(price_ms=1.0), 0)
    with pytest.raises(JobError, match="jetson-tx9"):
        METHOD.init(bundle, SearchParams(board="jetson-tx9"), 0)


def test_the_report_prints_and_draws_the_front(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of the demo's job: a line for each candidate with the fleet's boards, and a plot with tooltips."""
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
    run, status = agents.run_fleet_virtually(agents.FleetPlan(job, demo.HERE / "bundle", tmp_path / "home"))
    assert status == "done"
    capsys.readouterr()
    with Store(tmp_path / "home") as store:
        found = candidate_costs.load_candidates(store, run)
        page = report.write_run_page(store, run, tmp_path / "page.html").read_text()
    printed = capsys.readouterr().out
    assert "ms, jetson-nano" in printed
    assert len(re.findall(r" % +front ", printed)) == sum(each["front"] for each in found) > 0
    for text in ("What the candidates cost", "MFLOP of one example", "ms, jetson-nano"):
        assert text in page
    assert page.count(" MFLOP</title>") == len(found)
    kinds = {each["kind"] for each in found}
    assert len(kinds) > 1
    assert all(f">{key}</text>" in page for key in (*kinds, "front (filled dots)"))  # the plot's legend


def test_a_narrow_terminal_shows_a_row_of_numbers_for_each_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are longer than a line: they stand below, whole, and what is on the front is beside the accuracy."""
    from fedquilt.coordinator import settings

    monkeypatch.setenv("COLUMNS", "80")
    fleet = {"devices": 2, "boards": ["jetson-tx2"]}
    found = candidates()
    printed = candidate_costs.format_candidate_table(
        found, settings.parse_job({"name": "n", "method": "fedstitch", "rounds": 1, "fleet": fleet})
    )
    assert max(len(line) for line in printed[: len(found) + 1]) <= 80
    assert all(word in printed[0] for word in ("accuracy", "front", "MFLOP", "ms, jetson-tx2"))
    assert len(printed) == 2 * len(found) + 2
    assert not any(line.endswith("...") for line in printed)
