"""A run's views: columns that add up, sentences, weights and files; and runs of any coordinator's home."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views.run_summary import RunSummary, progress_points, summarise_events


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fq.Run:
    """One for all tests that only look at it, with checks in its rounds as a federation of boards has them."""
    pytest.importorskip("torch")
    home = tmp_path_factory.mktemp("views") / "runs"
    return fq.simulate(small(check={"every": 1}), home=home)


def small(**changes: Any) -> fq.Job:
    from fedquilt.tools.lab import demo

    table: dict[str, Any] = {
        "method": "fedavg",
        "name": "viewed",
        "params": {"lr": 0.2, "batch": 16},
        "rounds": 3,
        "engine": "numpy",
        "model": fq.models.mlp(64, [8], 10),
        "data": {"path": str(demo.HERE / "digits.npz"), "split": "train", "limit": 240},
        "test": {"limit": 100},
        "cohort": fq.Cohort(size=2),
        "fleet": fq.Fleet(4, boards=["jetson-tx2", "raspberry-pi-5"]),
    }
    return fq.Job(**{**table, **changes})


def summarised(store: Store, run: str) -> RunSummary:
    return summarise_events(store.find_job(run).job, store.read_events(run))


def test_rounds_and_devices_add_up_to_the_whole_run(run):
    with Store(run.home) as store:
        whole = summarised(store, run.id).total
    rounds, devices = run.rounds(), run.devices()
    for column, total in (("down_bytes", whole.down_bytes), ("up_bytes", whole.up_bytes), ("joules", whole.energy_j)):
        assert sum(rounds[column]) == pytest.approx(total)
        assert sum(value or 0 for value in devices[column]) == pytest.approx(total)
    assert sum(devices["tasks"]) == whole.tasks
    assert rounds["round"] == [1, 2, 3]
    assert rounds["participants"] == [2, 2, 2]
    assert devices["device"] == ["jetson-tx2-00", "jetson-tx2-02", "raspberry-pi-5-01", "raspberry-pi-5-03"]


def test_checks_in_rounds_are_of_the_round_before(run):
    with Store(run.home) as store:
        points = {
            point.rounds: point for point in progress_points(summarised(store, run.id)) if point.personal is not None
        }
    assert sorted(points) == [0, 1, 2, 3]
    held = [points[number].personal.weighted for number in (1, 2, 3)]
    assert run.rounds()["held_accuracy"] == held
    assert run.rounds()["loss"] != [points[number].personal.loss for number in (1, 2, 3)]  # it is the test set's
    assert {value for value in run.devices()["accuracy"] if value is not None}


def test_a_table_goes_into_data_frames(run):
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    table = run.rounds()
    assert table.to_pandas().equals(pandas.DataFrame(table.columns))
    assert table.to_polars().equals(polars.DataFrame(table.columns))
    assert list(table.to_polars()["participants"]) == [2, 2, 2]
    assert [row["round"] for row in table] == [1, 2, 3]
    assert len(table) == 3


def test_what_a_report_or_a_network_needs_is_named_with_its_extra(run, tmp_path, monkeypatch):
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for write in (lambda: run.report(tmp_path / "run.html"), run.plot):
        with pytest.raises(fq.JobError, match=r"needs matplotlib, .*: pip install 'fedquilt\[report\]'"):
            write()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fq.JobError, match=r"needs pandas, which is not installed: pip install 'fedquilt\[frames\]'"):
        run.rounds().to_pandas()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(fq.JobError, match=r"needs torch, .*: pip install 'fedquilt\[train\]'"):
        fq.simulate(run.job.replace(model=fq.models.rezero(64, 10)))


def test_a_table_is_readable_as_text_and_in_a_notebook(run):
    assert repr(run.rounds()).splitlines()[0].split()[:2] == ["round", "accuracy"]
    table = fq.Table({"<name>": list(range(100)), "value": [None] * 100})
    assert len(repr(table).splitlines()) == 42
    assert "&lt;name&gt;" in table._repr_html_()
    assert repr(fq.Table({"a": [], "b": []})) == "a  b"


def test_a_table_is_written_as_csv_or_json(tmp_path: Path) -> None:
    table = fq.Table({"device": ["a", "b"], "joules": [1.5, None]})
    assert table.write(tmp_path / "devices.csv").read_text() == "device,joules\na,1.5\nb,\n"
    rows = json.loads(table.write(str(tmp_path / "devices.json")).read_text())
    assert rows == [{"device": "a", "joules": 1.5}, {"device": "b", "joules": None}]
    with pytest.raises(fq.JobError, match=r"name a file that ends with \.csv or \.json"):
        table.write(tmp_path / "devices.xlsx")


def test_why_says_what_became_of_a_device(run):
    """As `fedquilt why` does; an unknown device is an error that names those there are."""
    said = run.why("jetson-tx2-00")
    *rounds, last = [line.partition(":")[0] for line in said]
    told = [tuple(map(int, re.findall(r"\d+", line))) for line in rounds]  # equal rounds are told together
    assert [number for span in told for number in range(span[0], span[-1] + 1)] == [1, 2, 3]
    assert last == "final evaluation"
    assert run.log()[0] == "started"
    assert any("answered" in line or "not drawn" in line for line in said)
    assert run.why(round=1)[0] == "round 1:"
    with pytest.raises(fq.JobError, match=r"'jetson-nano-03'; did you mean 'jetson-tx2-02'\? It knows jetson-tx2-00"):
        run.why("jetson-nano-03")


def test_weights_are_those_of_the_export(run, tmp_path):
    weights = run.weights()
    assert {name: array.shape for name, array in weights.items()} == {
        "1.weight": (8, 64),
        "1.bias": (8,),
        "3.weight": (10, 8),
        "3.bias": (10,),
    }
    numpy = pytest.importorskip("safetensors.numpy")
    held = numpy.load_file(run.export(tmp_path / "net.safetensors"))
    assert all(np.array_equal(held[name], weights[name]) for name in weights)
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(run.export(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).random((5, 64), np.float32)
    hidden = np.maximum(x @ weights["1.weight"].T + weights["1.bias"], 0)
    wanted = hidden @ weights["3.weight"].T + weights["3.bias"]
    np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, atol=1e-5)


def test_a_run_of_any_home_is_opened(run, tmp_path, capsys):
    for name in (run.id, "viewed"):
        assert fq.Run.open(run.home, name).rounds() == run.rounds()
    assert run.job == small(check={"every": 1})
    assert run.status == "done"
    assert repr(run).startswith(f"<Run {run.id}: done, 3 rounds, accuracy ")
    assert main(["ls", "--home", str(run.home)]) == 0
    assert run.id in capsys.readouterr().out
    with pytest.raises(fq.StoreError, match=r"no run 'other'.*viewed-"):
        fq.Run.open(run.home, "other")
    with pytest.raises(fq.StoreError, match="give the home of a coordinator"):
        fq.Run.open(tmp_path, "viewed")


def test_a_column_that_there_is_not_is_told_with_those_there_are(run):
    with pytest.raises(KeyError, match=r"no column 'acuracy'; did you mean 'accuracy'\? There are: round, accuracy, "):
        run.rounds()["acuracy"]


def test_an_export_of_another_ending_is_refused(run, tmp_path):
    """No safetensors in a file called .pt, which no program would read."""
    with pytest.raises(
        fq.JobError, match=r"net\.pt: weights are safetensors or ONNX: name a file that ends with \.onnx"
    ):
        run.export(tmp_path / "net.pt")
    assert not (tmp_path / "net.pt").exists()


def test_a_run_draws_its_accuracy_over_each_cost(run: fq.Run) -> None:
    """The last point is the last row of `rounds`; energy of simulated devices is predicted."""
    pytest.importorskip("matplotlib")
    table = run.rounds()
    drawn = run.plot().lines[0]
    assert (drawn.get_xdata()[-1], drawn.get_ydata()[-1]) == (3, pytest.approx(100 * table["accuracy"][-1]))
    axes = run.plot("joules")
    assert axes.get_xlabel() == "J of the boards, gross, predicted by profile"
    with Store(run.home) as store:
        assert axes.lines[0].get_xdata()[-1] == pytest.approx(progress_points(summarised(store, run.id))[-1].energy_j)
    assert run.plot("seconds").get_xlabel().startswith("virtual time, ")
    assert run.plot("bytes", axes) is axes
    with pytest.raises(fq.JobError, match="there is no plot over 'joule'; did you mean 'joules'"):
        run.plot("joule")


def test_evaluations_beside_the_rounds_are_drawn(tmp_path: Path) -> None:
    """Without [check] and without a test set, the held-out shares are what `rounds` has."""
    pytest.importorskip("matplotlib")
    from fedquilt.tools.lab import demo

    with np.load(demo.HERE / "digits.npz") as digits:
        np.savez(tmp_path / "train.npz", x_train=digits["x_train"][:240], y_train=digits["y_train"][:240])
    job = small(test={}, data={"path": str(tmp_path / "train.npz"), "split": "train"})
    run = fq.simulate(job, home=tmp_path / "runs")
    held = run.rounds()["held_accuracy"]
    assert run.rounds()["accuracy"] == held
    for x in ("rounds", "seconds", "joules", "bytes"):
        assert list(run.plot(x).lines[0].get_ydata()) == pytest.approx([100 * value for value in held])
    page = run.report(tmp_path / "page.html").read_text()
    assert "Not measured" not in page
    assert f"{100 * held[-1]:.1f} %" in page


def test_a_fleet_is_drawn_by_its_examples(run: fq.Run) -> None:
    """A name for each device and class, and a circle for each class that a device has."""
    pytest.importorskip("matplotlib")
    axes = run.job.plot_fleet()
    shown = {text.get_text() for text in axes.texts}
    assert {"jetson-tx2-00", "raspberry-pi-5-01", "jetson-tx2-02", "raspberry-pi-5-03", "0", "9"} <= shown
