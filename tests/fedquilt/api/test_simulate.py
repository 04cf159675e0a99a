"""fq.simulate: the command's own rounds, bit for bit, and what is shown and told meanwhile."""

import gc
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedquilt as fq
from fedquilt.api import run as runs
from fedquilt.api import simulation
from fedquilt.cli import main
from fedquilt.coordinator.rounds.events import CohortSelected, RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import MAX_COORDINATOR_GAP_S, Store
from fedquilt.core import JobError


def outcome(run: fq.Run) -> tuple[list[Any], list[Any], list[str]]:
    with Store(run.home) as store:
        facts = [fact for _, _, fact in store.read_events(run.id)]
    usage = [(f.round, f.update.device, f.update.usage) for f in facts if isinstance(f, UpdateAccepted)]
    return (
        [(fact.round, fact.devices) for fact in facts if isinstance(fact, CohortSelected)],
        sorted((number, device, used.down_bytes, used.up_bytes) for number, device, used in usage),
        [fact.state.sha256 for fact in facts if isinstance(fact, RoundCommitted)],
    )


def commanded(job: fq.Job, folder: Path) -> fq.Run:
    file = str(job.write(folder / "job.toml"))
    assert main(["prepare", file]) == 0
    assert main(["simulate", file, "--link", "memory", "--home", str(folder / "fleet")]) == 0
    return fq.Run.open(folder / "fleet", "job")


@pytest.mark.parametrize("changes", [{"wire": {"codec": "int8"}}, {"method": "scaffold", "check": {"every": 1}}])
def test_values_are_the_commands_to_the_bit(job, changes, tmp_path):
    job = job.replace(**changes)
    wanted = commanded(job, tmp_path)
    assert len(outcome(wanted)[2]) >= job.rounds
    plain = fq.simulate(job, evaluate=False, home=tmp_path / "plain")
    assert outcome(plain) == outcome(wanted)
    assert outcome(fq.simulate(job, workers=2, home=tmp_path / "beside")) == outcome(wanted)
    for column in ("round", "accuracy", "loss", "train_loss", "down_bytes", "up_bytes", "participants"):
        if column not in ("accuracy", "loss") or not job.test:  # the command evaluates on no test set
            assert plain.rounds()[column] == wanted.rounds()[column], column


def test_the_global_model_is_evaluated_beside_every_round(job):
    run, blind = fq.simulate(job), fq.simulate(job, evaluate=False)
    assert all(0 < value < 1 for value in run.rounds()["accuracy"])
    assert run.rounds()["accuracy"] != run.rounds()["held_accuracy"]
    assert None not in run.rounds()["loss"]
    for column in ("down_bytes", "up_bytes", "joules", "participants"):
        assert run.rounds()[column] == blind.rounds()[column]
    assert blind.rounds()["held_accuracy"] == [None] * 3


def test_a_seed_is_that_of_the_job(job):
    one, other = fq.simulate(job, seed=1), fq.simulate(job.replace(seed=1))
    assert outcome(one) == outcome(other)
    assert outcome(one) != outcome(fq.simulate(job))
    assert one.job.seed == 1


def test_a_temporary_home_lasts_as_long_as_its_run(job):
    run = fq.simulate(job.replace(rounds=1))
    home = run.home
    assert run.status == "done"
    del run
    gc.collect()
    assert not home.exists()


def break_off(row: Mapping[str, Any]) -> None:
    if row["round"] == 2:
        raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_in_its_home(job, home, tmp_path):
    job = job.replace(method="scaffold")
    with pytest.raises(KeyboardInterrupt):
        fq.simulate(job, home=home, on_round=break_off)
    first = fq.Run.open(home, "job")
    assert first.status == "interrupted"
    run = fq.simulate(job, home=home)
    assert run == first
    assert run.status == "done"
    whole = fq.simulate(job, home=tmp_path / "whole")
    assert outcome(run)[2] == outcome(whole)[2]
    assert run.rounds()["accuracy"] == whole.rounds()["accuracy"]


@pytest.mark.parametrize("check", [{}, {"every": 1}])
def test_a_callback_receives_every_round_once(job, check):
    rows = []
    run = fq.simulate(job.replace(check=check), on_round=rows.append)
    assert rows == [*run.rounds()] == list(run.follow())


def test_a_callback_that_fails_is_logged_and_the_run_goes_on(job, caplog):
    def fail(row):
        raise ConnectionError("no answer")

    assert fq.simulate(job.replace(rounds=1), on_round=fail).status == "done"
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage() == "on_round failed at round 1, and the run continues"
    assert isinstance(warning.exc_info and warning.exc_info[1], ConnectionError)


def test_the_rounds_of_a_run_under_way_are_followed_to_its_end(job, tmp_path, monkeypatch):
    whole = fq.simulate(job.replace(rounds=2), home=tmp_path / "whole")
    with Store(whole.home) as store:
        row, facts = store.find_job(whole.id), [fact for _, _, fact in store.read_events(whole.id)]
    seen = []  # rounds that were received when the coordinator went on
    rows = []
    with Store(tmp_path / "runs") as served:
        assert served.acquire_lock()
        run = served.add_job(row.job, row.bundle)
        served.set_status(run, "running")

        def go_on(seconds):
            seen.append(len(rows))
            for fact in facts[:4]:
                served.append_event(run, fact)
            del facts[:4]
            if not facts:
                served.set_status(run, "done")

        monkeypatch.setattr(runs.time, "sleep", go_on)
        for each in fq.Run(tmp_path / "runs", run).follow():
            rows.append(each)
    assert {0, 1} <= set(seen), "the first round comes before the second one's events"
    assert [each["round"] for each in rows] == [1, 2]


def test_a_run_without_a_coordinator_is_not_followed_for_ever(job, tmp_path, monkeypatch):
    """Its rounds so far come first. A coordinator that has ended is waited for, as one that is started again."""
    with pytest.raises(KeyboardInterrupt):
        fq.simulate(job, home=tmp_path, on_round=break_off)
    run, rows, slept = fq.Run.open(tmp_path, "job"), list[Mapping[str, Any]](), list[float]()
    clock = [0.0]  # instead of the module `time`, which threads of other tests share
    monkeypatch.setattr(runs, "time", types.SimpleNamespace(sleep=slept.append, monotonic=lambda: clock[0]))
    with pytest.raises(
        JobError, match=r"no coordinator is running for .*: `fedquilt\.simulate`, or .* with this job and home"
    ):
        rows.extend(run.follow())
    assert (rows, slept) == ([*run.rounds()], [])
    serving = Store(tmp_path)
    assert serving.acquire_lock()

    def advance(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += 4.0
        serving.close()

    monkeypatch.setattr(runs.time, "sleep", advance)
    with pytest.raises(JobError, match="no coordinator is running for"):
        list(run.follow())
    assert 4 * len(slept) == MAX_COORDINATOR_GAP_S


def test_the_command_does_not_resume_what_python_began(job, home, capsys):
    with pytest.raises(KeyboardInterrupt):
        fq.simulate(job, home=home, on_round=break_off)
    assert main(["resume", "job", "--home", str(home)]) == 2
    how = "`fedquilt.simulate`, or `fedquilt simulate JOB --engine ENGINE`, with this job and home continues job"
    assert how in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"data": {}}, fq.JobError, r"the job has no data: give some, as in fq\.Job"),
        ({"model": {"name": "mpl"}}, fq.ModelError, "network 'mpl' is unknown"),
        ({"model": fq.models.mlp(63, [8], 10)}, fq.DataError, "64"),
        ({"fleet": {"budgets": ["1XB"]}}, fq.JobError, r"\[fleet\]: .*1XB"),
    ],
)
def test_what_cannot_be_run_is_said_before_a_run_is_begun(job, home, changes, kind, said):
    with pytest.raises(kind, match=said):
        fq.simulate(job.replace(engine=None, **changes), home=home)
    assert not (home / "fedquilt.db").exists()


# -- progress -------------------------------------------------------------------------------------


def test_a_line_is_shown_only_where_somebody_looks(job, capsys):
    job = job.replace(rounds=1)
    fq.simulate(job)
    fq.simulate(job, progress=False)
    assert capsys.readouterr() == ("", "")
    fq.simulate(job, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "round 1 of 1, accuracy" in shown.err
    assert shown.err.endswith(" %\n")


class Handle:
    def __init__(self, shown: list[str]) -> None:
        self._shown = shown

    def update(self, what: str) -> None:
        self._shown.append(what)


def notebook(shown: list[str]) -> dict[str, types.ModuleType]:
    def show(what: str, display_id: bool) -> Handle:
        assert display_id
        shown.append(what)
        return Handle(shown)

    ipython, inner = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    inner.HTML, inner.display = str, show
    ipython.display = inner
    return {"IPython": ipython, "IPython.display": inner}


def test_a_notebook_updates_one_output(job, monkeypatch):
    shown = []
    for name, module in notebook(shown).items():
        monkeypatch.setitem(sys.modules, name, module)
    fq.simulate(job.replace(rounds=1))
    assert len(shown) == 2
    assert "round 1 of 1, accuracy" in shown[-1]
    sys.modules["IPython"].get_ipython = lambda: object()
    assert type(simulation.make_display(None)) is simulation.Display
