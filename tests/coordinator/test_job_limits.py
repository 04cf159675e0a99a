"""[stop]: what ends a job early."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import msgspec
import numpy as np
import pytest
from evaluations import of_classes, of_numbers
from homes import Federation
from hypothesis import given
from hypothesis import strategies as st
from job_facts import started_state, whole_round
from saved_homes import saved

from fedquilt import methods
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.jobs.retention import GarbageCollector
from fedquilt.coordinator.rounds.decisions import decide_event
from fedquilt.coordinator.rounds.events import JobEnded, JobStarted, RoundCommitted
from fedquilt.coordinator.rounds.job_limits import ResourceUsage, describe_reached_limit, describe_unmetered_tasks
from fedquilt.coordinator.rounds.job_state import JobState, apply_event
from fedquilt.coordinator.settings import JobLimits
from fedquilt.coordinator.storage import backup
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates.aggregation import describe_early_end
from fedquilt.core import BlobRef, EvaluationSums, JobError, Update, Usage, evaluation
from fedquilt.tools.artefacts import export


def update(usage: Usage, below: Usage | None = None) -> Update:
    """An answer that took so much."""
    told = {"bundles": {}, "metrics": {}, "usage": usage, "devices_usage": below}
    return Update(job="j", round=0, attempt=0, device="a", weight=1.0, **told)


def test_bytes_of_a_sites_boards_are_spent_beside_its_own():
    site = update(Usage(energy_j=3.0, down_bytes=5, up_bytes=2), Usage(energy_j=3.0, down_bytes=100, up_bytes=50))
    assert ResourceUsage().add_update(site) == ResourceUsage(joules=3.0, metered=1, bytes=157)


def test_each_limit_ends_a_job_when_it_is_reached_and_says_so():
    spent = ResourceUsage(joules=30.0, bytes=700, wall_s=60.0)
    assert describe_reached_limit(JobLimits(), spent) is None
    assert describe_reached_limit(JobLimits(max_joules=30.1, max_bytes=701, max_wall_s=60.1), spent) is None
    assert describe_reached_limit(JobLimits(max_joules=30.0), spent) == "max_joules: 30 J of 30 J are used"
    assert describe_reached_limit(JobLimits(max_bytes=700), spent) == "max_bytes: 700 bytes of 700 are used"
    assert describe_reached_limit(JobLimits(max_wall_s=59.0), spent) == "max_wall_s: 60 s of 59 s are used"


def test_joules_that_nobody_measured_end_nothing_but_are_spoken_of():
    spent = ResourceUsage(joules=0.0, unmetered=2)
    assert describe_reached_limit(JobLimits(max_joules=1.0), spent) is None
    assert describe_unmetered_tasks(JobLimits(max_joules=1.0), spent) == (
        "max_joules = 1 has no effect: no device of this job measures its energy. The job ends after its rounds or at "
        "another limit of [stop]"
    )
    some = ResourceUsage(joules=0.5, metered=1, unmetered=2)
    assert describe_unmetered_tasks(JobLimits(max_joules=1.0), some) == (
        "0.5 J of max_joules = 1 J are used, not counting 2 tasks on devices without a power meter"
    )
    assert describe_unmetered_tasks(JobLimits(), spent) is None
    assert describe_unmetered_tasks(JobLimits(max_joules=1.0), ResourceUsage(joules=0.5)) is None
    assert "not counting 1 task on" in str(
        describe_reached_limit(JobLimits(max_joules=1.0), ResourceUsage(joules=1.5, unmetered=1))
    )


def test_a_method_that_ends_by_itself_and_has_not_is_told_in_the_last_round():
    stitching = methods.load("fedstitch")
    told = describe_early_end(stitching, "fedstitch", 3, 2)
    assert told.startswith("fedstitch has not finished after the job's 3 rounds")
    assert describe_early_end(stitching, "fedstitch", 3, 1) is None
    assert describe_early_end(methods.load("fedavg"), "fedavg", 3, 2) is None


TABLE = {"name": "j", "method": "fedavg"}


def state(round: int) -> BlobRef:
    return BlobRef(sha256=f"{round:064x}", size=1)


def evaluated(values: list[EvaluationSums | None], limits: JobLimits, every: int = 1) -> JobState:
    """The state of a job after a round for each evaluation."""
    plan = msgspec.structs.replace(started_state(rounds=99, check_every=every).constants, stop=limits)
    reached = apply_event(JobState(plan), JobStarted(state(0)), 0.0)
    for round, sums in enumerate(values):
        *before, _ = whole_round("a", round=round)
        for fact in (*before, RoundCommitted(round, state(round + 1), False, {}, evaluation=sums)):
            reached = apply_event(reached, fact, 0.0)
    return reached


# -- the rule -------------------------------------------------------------------------------------


def stopped_after(values: list[float], patience: int, least: float, *, higher: bool) -> tuple[int | None, int]:
    """Keras's EarlyStopping, restated: number of the evaluation at which it stops, and of the best one before."""
    marked, waited = None, 0
    for number, value in enumerate(values):
        gain = 0.0 if marked is None else (value - marked if higher else marked - value)
        if marked is None or (gain > 0 and gain >= least - 1e-9):
            marked, waited = value, 0
        else:
            waited += 1
        if waited >= patience:
            seen = values[: number + 1]
            return number, seen.index(max(seen) if higher else min(seen))
    return None, values.index(max(values) if higher else min(values))


@hypothesis.settings(max_examples=60)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=16),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.02, 0.1]),
    st.booleans(),
)
def test_a_job_ends_when_kerass_rule_ends_it(values, patience, least, higher):
    numbers = [value / 50 for value in values]
    sums = [of_classes(each, 50) if higher else of_numbers(each, each / 2, 10) for each in numbers]
    limits = JobLimits(patience=patience, min_gain=least)
    end, best = stopped_after(numbers, patience, least, higher=higher)
    upto = len(numbers) if end is None else end + 1
    reached = evaluated(sums[:upto], limits)
    assert (reached.reached_limit is None) == (end is None)
    assert reached.best.rounds == best
    assert reached.best.state == state(best)
    assert reached.best.value == pytest.approx(numbers[best])
    if end:
        assert evaluated(sums[:end], limits).reached_limit is None


def test_the_end_names_its_reason():
    sums = [of_classes(each) for each in (0.5, 0.8, 0.8, 0.7)]
    reached = evaluated(sums, JobLimits(patience=2))
    assert decide_event(reached, 1.0, {"a"}) == JobEnded(
        "done", "patience: no gain in 2 evaluations; the best is accuracy 80.00 % after 1 round"
    )
    some = evaluated([of_numbers(each, 0.1, 10) for each in (0.5, 0.41)], JobLimits(patience=1, min_gain=0.1))
    assert some.reached_limit == "patience: no gain of 0.1 in 1 evaluation; the best is RMSE 0.41 after 1 round"


def test_rounds_without_an_evaluation_count_for_nothing():
    none = evaluated([of_classes(0.5), None, None, None], JobLimits(patience=1))
    assert (none.reached_limit, none.best.without_gain) == (None, 0)
    assert evaluated([of_classes(0.5)] * 3, JobLimits(patience=1), every=0).best is None
    assert evaluated([of_classes(0.5)] * 3, JobLimits()).reached_limit is None


def test_a_gain_that_is_rounded_down_counts():
    sums = [of_classes(0.28, 100), of_classes(0.29, 100)]
    assert evaluated(sums, JobLimits(patience=1, min_gain=0.01)).reached_limit is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"stop": {"patience": 0}, "check": {"every": 1}}, r"\[stop\] patience = 0|patience = 0"),
        ({"stop": {"patience": 1.5}, "check": {"every": 1}}, "patience"),
        (
            {"stop": {"patience": 3}},
            r"\[stop\] patience = 3 needs evaluations by devices: set \[check\] every = 1",
        ),
        (
            {"stop": {"patience": 3}, "check": {"every": 1, "beside": True}},
            r"needs evaluations by devices: remove \[check\] beside",
        ),
        ({"stop": {"min_gain": 0.1}}, r"\[stop\] min_gain = 0.1 has no effect without patience"),
        ({"stop": {"patience": 3, "min_gain": -0.1}, "check": {"every": 1}}, "min_gain = -0.1"),
        ({"stop": {"patience": 3, "min_gain": float("nan")}, "check": {"every": 1}}, "min_gain = nan"),
        ({"stop": {"patience": 3, "min_gain": float("inf")}, "check": {"every": 1}}, "min_gain = inf"),
    ],
)
def test_a_wrong_table_says_what_is_wrong(table, message):
    with pytest.raises(JobError, match=message):
        settings.parse_job({**TABLE, **table})


# -- the best state -------------------------------------------------------------------------------


def stopping(folder: Path) -> Federation:
    return Federation(folder, "fedavg", rounds=60, check={"every": 1}, stop={"patience": 3, "min_gain": 0.01})


def made(folder: Path) -> Federation:
    """With data that can be learnt in part: the brightest third of an image, and noise."""
    found, draw = stopping(folder).create(), np.random.default_rng(4)
    for path in sorted(folder.glob("data-*.npz")):
        x = draw.random((60, 4, 4), np.float32)
        y = (x.reshape(60, 16)[:, :15].reshape(60, 3, 5).sum(axis=2) + draw.normal(0, 0.5, (60, 3))).argmax(axis=1)
        np.savez(path, x=x, y=y)
    return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    found = made(tmp_path_factory.mktemp("calm"))
    found.run()
    return found


def home(federation: Federation) -> Path:
    return federation.folder / "coordinator"


def best_state(folder: Path, run: str) -> dict[str, np.ndarray]:
    with Store(folder) as store:
        return dict(export.load_result(store, run, best=True).tensors)


def outcome(federation: Federation) -> tuple[list[str], list[bool], JobEnded]:
    facts = federation.facts()
    committed = [fact for fact in facts if isinstance(fact, RoundCommitted)]
    assert isinstance(facts[-1], JobEnded)
    return federation.states(), [fact.best for fact in committed], facts[-1]


def test_the_best_state_is_the_one_that_devices_evaluated_best(calm: Federation) -> None:
    states, bests, ended = outcome(calm)
    assert ended.status == "done"
    assert ended.reason.startswith("patience: no gain of 0.01 in 3 evaluations; the best is accuracy")
    assert len(bests) < 60
    right = []
    for fact in calm.facts():
        if isinstance(fact, RoundCommitted):
            matrix = evaluation.confusion_matrix(fact.evaluation)
            right.append(sum(row[kind] for kind, row in enumerate(matrix)))
    first = right.index(max(right))
    assert [number for number, best in enumerate(bests) if best][-1] == first
    assert 0 < first < len(right) - 1
    with Store(home(calm)) as store:
        kept = {path.name for path in store.blob_store.folder.iterdir() if len(path.name) == 64}
        assert {states[first], states[-1]} <= store.referenced_blobs()
        assert kept.isdisjoint(set(states) - {states[first], states[-1]})
        assert store.blob_store.blob_path(states[first]) is not None


def test_the_best_state_outlives_garbage_collection_and_is_in_a_backup(
    calm: Federation, tmp_path: Path, capsys
) -> None:
    wanted = best_state(home(calm), calm.job)
    with Store(home(calm)) as store:
        assert store.acquire_lock()
        collector = GarbageCollector(store)
        collector.add_all_blobs()
        assert collector.collect()
    backup.restore_backup(saved(home(calm), tmp_path / "b.tar"), tmp_path / "again")
    found = best_state(tmp_path / "again", calm.job)
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in wanted.items()
    }
    with Store(tmp_path / "again") as store:
        last = export.load_result(store, calm.job).tensors
    assert any(not np.array_equal(last[name], wanted[name]) for name in wanted)
    out = tmp_path / "best.safetensors"
    assert main(["model", "export", calm.job, "--best", "--out", str(out), "--home", str(tmp_path / "again")]) == 0
    assert "rounds, the best that devices evaluated" in capsys.readouterr().out
    assert main(["why", calm.job, "--home", str(tmp_path / "again")]) == 0
    assert "best evaluation: accuracy" in capsys.readouterr().out


def test_a_run_without_evaluations_has_no_best_state(tmp_path: Path, capsys) -> None:
    federation = Federation(tmp_path, "fedavg", rounds=2, check={"every": 0}).create()
    federation.run()
    words = [
        "model",
        "export",
        federation.job,
        "--best",
        "--out",
        str(tmp_path / "b.onnx"),
        "--home",
        str(home(federation)),
    ]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "has no evaluation by devices yet" in said
    assert "leave --best out" in said
