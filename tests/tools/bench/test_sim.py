"""The bench of simulated fleets, small: every contestant of this environment takes the same steps."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedquilt.core import DataError, JobError
from fedquilt.tools.lab.bench import sim
from fedquilt.tools.report.thresholds import format_figures

TINY = replace(sim.OVERHEAD, clients=6, each=40, asked=4, rounds=8)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """IDX files of 28x28 images: a bright row tells the class."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for split, count in (("train", 300), ("t10k", 100)):
        draws = np.random.default_rng(count)
        y = draws.integers(10, size=count).astype(np.uint8)
        x = draws.integers(60, size=(count, 28, 28)).astype(np.uint8)
        x[np.arange(count), 2 * y + 4] = 255
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{split}-{kind}-ubyte").write_bytes(head + array.tobytes())
    return folder


@pytest.mark.nightly
def test_ours_and_the_bare_loop_take_the_same_steps(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    said: dict[tuple[str, float, float], None] = {}
    rows: list[str] = []
    monkeypatch.setattr(sim, "NAMES", {"W2": TINY})
    result = sim.measure(images, repeats=1, processes=2, show=lambda *told: said.setdefault(told), report=rows.append)
    names = ("fedquilt", "fedquilt, torch engine", "bare loop, 2 processes", "bare loop, 1 process")
    assert list(said) == [(f"overhead, turn 1 of 1: {name}", done, 4) for done, name in enumerate(names)]
    assert [row.partition(": ")[0] + row.partition(": ")[2].partition(": ")[0] for row in rows] == [
        f"overhead, turn 1 of 1{name}" for name in names
    ]
    told = result["workloads"]["overhead"]
    assert set(told) == {"ours", "ours_torch", "bare_n", "bare_1"}
    for name, each in told.items():
        assert each["accuracy"] > 0.5
        assert each["accuracy"] == pytest.approx(told["bare_1"]["accuracy"], abs=0.1)
        assert each["rate"] > 0
        assert 0 < each["start_s"] < each["wall_s"]
        assert (
            each["rss_mb"] >= each["pss_mb"] > (30 if name == "ours" else 100)
        )  # ours needs no torch for this network
    figures = result["figures"]
    ratio = told["ours"]["rate"] / told["bare_n"]["rate"]
    assert figures["overhead_of_bare_loop_by_wall"]["value"] == pytest.approx(ratio, abs=0.001)
    by_cpu = told["ours"]["cpu_rates"][0] / told["bare_n"]["cpu_rates"][0]
    assert figures["overhead_of_bare_loop_by_cpu"]["value"] == pytest.approx(by_cpu, abs=0.001)
    assert "overhead_of_flower" not in figures
    assert sim.lines(result)[-len(figures) :] == format_figures(result)


def test_images_that_do_not_do_are_refused(images: Path) -> None:
    with pytest.raises(DataError, match="600 images of 28x28 are needed, not 300"):
        sim.write_workload(replace(TINY, clients=15), images, images / "out")
    with pytest.raises(DataError):
        sim.write_workload(TINY, images / "nowhere", images / "out")


def test_one_workload_can_be_run_by_itself() -> None:
    assert [work.name for work in sim.select_workloads(())] == ["compute", "overhead"]
    assert [work.name for work in sim.select_workloads(("W2",))] == ["overhead"]
    with pytest.raises(JobError, match="no workload 'w3' for --only: there are W1, W2"):
        sim.select_workloads(("w3",))


def test_a_simulator_that_nobody_knows_is_refused_before_anything_runs(images: Path) -> None:
    with pytest.raises(JobError, match="--with abacus: there are flower, pfl"):
        sim.measure(images, beside=("abacus",))


def test_a_simulator_that_cannot_be_installed_is_told_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")  # what the contestants' environments take it from
    (tmp_path / "index").mkdir()
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path / "index"))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found, absent = sim._prepare_contestants(["pfl"], 2)
    assert [each.name for each in found] == ["ours", "ours_torch", "bare_n", "bare_1"]
    assert absent["pfl"].startswith("pfl-research cannot be installed here: ")
    assert not (sim.cache_folder() / "pfl" / "ready").exists()
