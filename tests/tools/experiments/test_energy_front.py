"""`fedquilt lab front`: plans of a job's rounds as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from fedquilt import profiles
from fedquilt.cli import main
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice
from fedquilt.tools.experiments import energy_front
from fedquilt.tools.simulation import agents

DIGITS = Path(agents.__file__).parents[1] / "lab" / "demo" / "digits.npz"


def job(
    folder: Path, method: str = "fednova", more: str = "", boards: str = '"jetson-nano", "jetson-orin-nano"'
) -> Path:
    file = folder / "job.toml"
    file.write_text(
        f'name = "digits"\nmethod = "{method}"\n[params]\nepochs = 3\n[cohort]\ndeadline = "energy"\n{more}\n'
        f'[fleet]\ndevices = 4\nboards = [{boards}]\n[data]\npath = "{DIGITS}"\npartition = "iid"\n'
        '[model]\nname = "mlp"\ninputs = 64\nhidden = [8]\nclasses = 10\n'
    )
    return file


def told(file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert main(["lab", "front", str(file), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_front_falls_from_its_shortest_plan_to_its_cheapest_which_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(job(tmp_path), capsys)
    plans, even = found["front"], found["front_even"]
    assert [each["seconds"] for each in plans] == sorted(each["seconds"] for each in plans)
    assert [each["joules"] for each in plans] == sorted((each["joules"] for each in plans), reverse=True)
    assert found["chosen"] == plans[-1]
    assert all(sum(each["epochs"].values()) >= 11 for each in plans)  # shares differ by an example
    assert all(set(each["epochs"].values()) == {3} for each in even)
    assert plans[-1]["joules"] < even[-1]["joules"] <= found["predicted"]["joules"]


def test_bounds_of_the_job_choose_among_the_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = told(job(tmp_path), capsys)["front"]
    middle = plans[len(plans) // 2]
    for bound in (f"deadline_s = {middle['seconds'] * 1.000001}", f"joules_per_round = {middle['joules'] * 1.000001}"):
        chosen = told(job(tmp_path, more=bound), capsys)["chosen"]
        assert chosen["joules"] <= middle["joules"] * 1.00001
        assert chosen["seconds"] <= middle["seconds"] * 1.00001


def test_a_bound_that_no_plan_keeps_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for bound in ("joules_per_round = 0.001", "deadline_s = 0.001"):
        assert main(["lab", "front", str(job(tmp_path, more=bound))]) == 0
        assert f"no plan keeps {bound}: the chosen plan exceeds it least" in capsys.readouterr().out
    for bound in ("joules_per_round = 100000", "deadline_s = 100"):
        assert main(["lab", "front", str(job(tmp_path, more=bound))]) == 0
        assert "no plan keeps" not in capsys.readouterr().out


def test_the_table_fits_80_columns_and_the_picture_has_what_is_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "front.svg"
    assert main(["lab", "front", str(job(tmp_path)), "--out", str(picture)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines()[:-1])) <= 80
    for word in ("chosen", "predicted", "even", "jetson-orin-nano 4-5"):
        assert word in text
    drawn = picture.read_text()
    for word in ("Joules of a round by its time", "chosen", "predicted", "the same epochs on every board"):
        assert word in drawn
    assert main(["lab", "front", str(job(tmp_path, "fedavg"))]) == 0
    text = capsys.readouterr().out
    assert "only the round time is chosen" in text
    assert max(map(len, text.splitlines()[-3:])) <= 80
    assert "even:" not in text


def test_boards_whose_idle_power_is_unknown_are_named_beside_the_joules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "front", str(job(tmp_path, boards='"jetson-nano", "jetson-xavier-nx"'))]) == 0
    assert "without the idle energy of jetson-xavier-nx (unknown)" in capsys.readouterr().out
    assert told(job(tmp_path), capsys)["idle_power_unknown"] == []


def test_boards_without_known_joules_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path)
    bare = profiles.load_board_profile("jetson-nano")
    points = tuple(msgspec.structs.replace(point, busy_w=None) for point in bare.operating_points())
    monkeypatch.setattr(energy_front.boards, "create_device", lambda name: SimulatedDevice(bare, points=points))
    assert main(["lab", "front", str(made)]) == 2
    assert "the time or joules of a task are unknown" in capsys.readouterr().err
