"""The demo as a newcomer runs it: agents as processes, the embedded broker, real digits, no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedquilt.cli import main
from fedquilt.tools.lab import demo
from fedquilt.tools.lab.demo import NetworkResult

COMMAND = [sys.executable, "-m", "fedquilt.cli", "demo"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-X", "importtime", "-m", "fedquilt.cli", "demo", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return out, ran.stdout, ran.stderr


def test_the_demo_prints_a_line_for_each_round_and_few_others_without_colours(told: tuple[Path, str, str]) -> None:
    out, shown, imported = told
    lines = shown.splitlines()
    rounds = [line for line in lines if re.match(r"\[ .*\] round \d+ of 60: [\d.]+ k?J predicted, ", line)]
    assert len(rounds) > 5
    assert len(lines) - len(rounds) <= 42
    assert max(len(line.replace(str(out), "")) for line in lines) <= 80
    assert "\x1b" not in shown
    assert "\r" not in shown
    for wanted in (
        "donors",
        "stitched by all boards",
        "donor turned + new head",
        "FedAvg from scratch",
        "The boards' network",
        "stitched.onnx: ",
    ):
        assert wanted in shown, wanted
    unwrapped = " ".join(shown.split())
    assert "The boards' network is the best here, by " in unwrapped
    interval = re.search(r"Over \w+ \+ new head, the 95 % interval is \[([\d.]+), ([\d.]+)\] points\.", unwrapped)
    assert interval is not None  # a sign would not match: the whole interval is above 0
    assert 0 < float(interval[1]) < float(interval[2])
    gains = [line.split()[0] for line in lines if re.match(r"\w+ +([\d.]+ +){3}\[", line)]
    assert gains == ["upright", "turned", "negative"]
    assert lines[-2].endswith("; report of the run, with plots (--open shows it):")
    assert lines[-1] == f"  {out / 'report.html'}"
    assert " torch" not in imported  # the coordinator, the comparisons, the export and the page need none
    assert "font cache" not in imported


def test_the_page_is_that_of_the_run(told: tuple[Path, str, str]) -> None:
    page = (told[0] / "report.html").read_text(encoding="utf-8")
    assert "test accuracy" in page
    assert "What each donor contributes" in page
    assert "as it is, %" in page
    assert "method = &#34;fedstitch&#34;" in page
    assert "[[donors]]" in page
    assert "<script" not in page


def test_what_the_demo_writes_classifies_as_it_says(told: tuple[Path, str, str]) -> None:
    out, shown, _ = told
    model = [str(out / "stitched.onnx"), str(out / "held-out.npz")]
    ran = subprocess.run([*COMMAND[:3], "model", "run", *model], capture_output=True, text=True, check=True)
    accuracy = re.search(rf"{demo.STITCHED} +([\d.]+)", shown)
    assert accuracy is not None
    printed = re.search(r"accuracy ([\d.]+) %", ran.stdout)
    assert printed is not None
    assert f"{float(printed[1]):.1f}" == accuracy[1]


@pytest.mark.nightly
def test_the_demo_stitches_a_network_and_sets_it_beside_everything_it_has_to_beat(tmp_path: Path) -> None:
    ran = subprocess.run(
        [*COMMAND, "-v", "--format", "json", "--out", str(tmp_path)], capture_output=True, text=True, check=True
    )
    result = json.loads(ran.stdout.splitlines()[-1])
    rows = {row["name"]: row for row in result["accuracy"]}
    stitched = rows[demo.STITCHED]
    assert stitched["note"].startswith("head on ")
    assert f"chosen: {stitched['note']}\n" in ran.stdout  # as the log of the search has it
    assert stitched["note"].count(" + ") >= 1, "several taps are joined"
    assert "joining taps adds " in ran.stdout
    for name, row in rows.items():
        if name != demo.STITCHED:
            assert stitched["accuracy"] > row["accuracy"], name
    assert 0 < result["lead"][0] < result["lead"][1]
    assert [donor["name"] for donor in result["donors"]] == ["upright", "turned", "negative"]
    for donor in result["donors"]:
        assert donor["unmodified"] < donor["head"] < donor["depths"] < stitched["accuracy"]
        assert donor["without"] < stitched["accuracy"]
    assert stitched["accuracy"] > 0.9
    scratch = rows["FedAvg from scratch"]
    assert scratch["accuracy"] > 0.6
    assert 0 < stitched["energy_j"] < scratch["energy_j"]  # forward passes only, by the boards' profiles
    assert len(result["devices"]) == len(result["alone"]) == 6
    for ledger in result["devices"].values():
        assert ledger["energy_source"].startswith("profile ")
        assert 30e6 < ledger["peak_bytes"] < 512e6
        assert ledger["down_bytes"] > 30_000  # the donors


def test_a_defeat_is_told_as_one() -> None:
    networks = [NetworkResult("ours", 0.9), NetworkResult("a", 0.8), NetworkResult("b", 0.95)]
    assert demo.format_verdict(networks) == "The boards' network is not the best here: b is 5.0 points better."
    assert (
        demo.format_verdict(networks[:2])
        == "The boards' network is the best here, by 10.0 points over the best of the others (a)."
    )


def test_a_demo_that_is_interrupted_ends_as_any_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 130: 8 is for a job that has failed."""
    monkeypatch.setattr(demo.agents, "run_fleet_on_broker", lambda *plan, **how: ("digits", "running"))
    assert main(["demo", "--out", str(tmp_path)]) == 130
    monkeypatch.setattr(demo.agents, "run_fleet_on_broker", lambda *plan, **how: ("digits", "failed"))
    assert main(["demo", "--out", str(tmp_path)]) == 8
