"""The bench of twice the cores, small: the same bits on half of the cores and on all, and what it refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fedquilt.core import JobError
from fedquilt.tools.lab.bench import cores, sim
from fedquilt.tools.report.thresholds import format_figures


@pytest.mark.nightly
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two cores")
def test_both_numbers_of_cores_come_to_the_same_model_and_the_ratio_is_of_this_run() -> None:
    """Ours and the bare loop, each held to its cores."""
    pytest.importorskip("torch")
    titles: dict[str, None] = {}
    result = cores.measure(cores=2, images=8, rounds=2, turns=1, show=lambda title, *_: titles.setdefault(title))
    of = ("pool, 1 core", "bare loop, 1 core", "pool, 2 cores", "bare loop, 2 cores")
    assert list(titles) == [f"turn 1 of 1: {title}" for title in of]
    half, whole = (result["runs"][name] for name in ("half", "whole"))
    assert result["ratios"] == [whole["rate"] / half["rate"]]
    assert len(result["bare_ratios"]) == 1
    assert result["figures"]["on_twice_the_cores"]["value"] == round(result["ratios"][0], 3)
    assert result["figures"]["runs_with_other_bits"]["reached"]
    assert all(each > 0 for each in result["coordinator_ms"].values())
    assert cores.lines(result)[-2:] == format_figures(result)


def test_a_contestant_and_its_children_keep_to_their_cores(tmp_path: Path) -> None:
    """Those that it is given, of those that there are."""
    only = max(os.sched_getaffinity(0))
    code = "import json, os, subprocess, sys; inner = 'import os; print(sorted(os.sched_getaffinity(0)))'\n"
    code += "told = subprocess.run([sys.executable, '-c', inner], capture_output=True, text=True).stdout\n"
    code += "print(json.dumps({'start_s': 0.1, 'rounds_s': [1, 1], 'cores': told.strip()}))"
    contestant = sim.Contestant("one", "one", (sys.executable, "-c", code), 1, cores=frozenset([only]))
    told = sim.run_contestant(contestant, tmp_path, sim.OVERHEAD, lambda: None)
    assert told["cores"] == f"[{only}]"


@pytest.mark.parametrize("count", [1, 3, 2 + 2 * len(os.sched_getaffinity(0))])
def test_cores_that_cannot_be_halved_or_are_not_there_are_refused(count: int) -> None:
    """Before anything runs."""
    with pytest.raises(JobError, match=f"{count} cores: an even number is wanted, from 2 to "):
        cores.measure(cores=count)


def test_a_cluster_is_measured_with_as_many_processors_as_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's cores say nothing of it."""
    for address, engine in (("", "ray://head:10001"), ("10.0.0.1:6379", "ray"), ("10.0.0.1:6379", "auto")):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(JobError, match=f"--engine {engine} names a cluster: say by --cores how many"):
            cores.measure(engine)
    with pytest.raises(JobError, match="'dask' is none of auto, pool, ray"):
        cores.measure("dask")
