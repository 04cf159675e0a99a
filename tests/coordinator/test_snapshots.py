"""A snapshot saves reading a log from its first fact; whatever becomes of it, the log says what holds."""

from __future__ import annotations

import hashlib
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from job_facts import BLOB
from stored_job import JOB

from fedquilt.coordinator import snapshots
from fedquilt.coordinator.deadline import Short
from fedquilt.coordinator.facts import (
    Answered,
    AnyFact,
    Asked,
    Closed,
    Committed,
    Declined,
    Ended,
    Extended,
    Lost,
    Noted,
    Plan,
    Rejected,
    Reopened,
    Resumed,
    Rounds,
    Started,
    Surveyed,
    apply,
)
from fedquilt.coordinator.snapshots import Standing
from fedquilt.coordinator.store import Store
from fedquilt.core import BlobRef, Update, Usage

NOW_S = 7.0
DEVICES = tuple("abcdef")


class Run:
    """A run in a store, written as its coordinator writes it."""

    def __init__(self, store: Store) -> None:
        self.store, self.id = store, store.add(JOB, store.home / "bundle")
        self.plan = Plan.of(JOB)
        self.standing = Standing(Rounds(self.plan))

    def record(self, *facts: AnyFact) -> None:
        for fact in facts:
            after = apply(self.standing.rounds, fact, NOW_S)
            self.store.append(self.id, fact)
            self.standing.take(fact, after)
            if isinstance(fact, Committed | Ended):
                self.store.snapshots.keep(self.id, self.standing)

    def round(self, number: int, *devices: str) -> None:
        answers = [Answered(number, of(self.id, device, number)) for device in devices]
        self.record(Asked(number, 0, devices), *answers, Closed(number), Committed(number, state(number), False, {}))


def of(run: str, device: str, round: int) -> Update:
    """An update with a blob of its own."""
    blob = BlobRef(sha256=f"{round:02x}{ord(device):02x}" * 16, size=1)
    usage = Usage(wall_s=1.5, examples=40 + round, energy_j=0.25 if device < "c" else None, up_bytes=9)
    return Update(run, round, 0, device, 1.0, {"model": blob}, {"loss": 0.5}, usage)


def state(round: int) -> BlobRef:
    return BlobRef(sha256=f"{round:04x}" * 16, size=5)


def taken_up(store: Store, run: str, plan: Plan) -> tuple[Standing, int]:
    """As a coordinator takes a run up: its snapshot, and the facts behind it; and where the snapshot ended."""
    standing, upto = store.snapshots.of(run, plan, NOW_S)
    for _, _, fact in store.facts(run, upto):
        standing.take(fact, apply(standing.rounds, fact, NOW_S))
    return standing, upto


def whole(store: Store, run: str, plan: Plan) -> Standing:
    """What all facts of a run come to."""
    standing = Standing(Rounds(plan))
    for _, _, fact in store.facts(run):
        standing.take(fact, apply(standing.rounds, fact, NOW_S))
    return standing


@pytest.fixture
def often(tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens stores on one folder that keep a snapshot of every round; all are closed at the end."""
    made: list[Store] = []

    def open() -> Store:
        made.append(Store(tmp_path, every=-len(DEVICES)))
        return made[-1]

    yield open
    for store in made:
        store.close()


@pytest.fixture
def run(often: Callable[[], Store]) -> Run:
    """A run of three rounds, with a snapshot after the third and two facts behind it."""
    made = Run(often())
    made.record(Started(BLOB), Surveyed(0, DEVICES))
    for number in range(3):
        made.round(number, *DEVICES)
    made.record(Asked(3, 0, DEVICES), Answered(3, of(made.id, "a", 3)))
    return made


def behind(made: Run) -> int:
    """Facts behind the snapshot with which a run is taken up, by another process."""
    with Store(made.store.home) as store:
        standing, upto = taken_up(store, made.id, made.plan)
        assert standing == whole(store, made.id, made.plan) == made.standing
        return sum(seq > upto for seq, _, _ in store.facts(made.id))


# -- what it holds --------------------------------------------------------------------------------


def test_a_run_is_taken_up_from_its_snapshot_and_the_facts_behind_it(run: Run) -> None:
    """Two facts are read instead of 31; the state is the same to the last field."""
    assert behind(run) == 2
    assert run.standing.facts == 31
    assert run.standing.examples == {"a": 43, **dict.fromkeys("bcdef", 42)}


def any_fact(roll: random.Random, run: str, now: Rounds) -> AnyFact:
    """A fact that may come next, of any kind that there is."""
    one = roll.choice(DEVICES)
    asked = sorted(now.asked)
    if now.phase == "new":
        return roll.choice([Started(BLOB, settles=roll.random() < 0.3), Noted("by [trigger]")])
    if now.phase in ("stopped", "failed"):
        return Resumed()
    if now.phase == "closing":
        if now.answered and roll.random() < 0.2:
            return Lost(now.round, min(now.answered), "it is gone")
        return Committed(now.round, state(now.round), False, {}, (), 2.5, settled=now.settling)
    if roll.random() < 0.05:
        return Ended(roll.choice(["stopped", "failed"]), "by request")
    if now.phase == "selecting":
        some = tuple(sorted(roll.sample(DEVICES, 3)))
        survey = Surveyed(now.round, some, {"hot": tuple(sorted(set(DEVICES) - set(some)))}, {one: roll.random()})
        epochs = {some[0]: 2} if roll.random() < 0.3 else {}
        return roll.choice([survey, Asked(now.round, now.attempt, some, dict.fromkeys(some, 2.0), 9.0, epochs=epochs)])
    if not asked:
        return roll.choice([Closed(now.round), Reopened(now.round, now.attempt + 1), Asked(now.round, 0, (one,))])
    code = roll.choice(["memory", "data", "none", "failed"])
    return roll.choice(
        [
            Answered(now.round, of(run, asked[0], now.round), 3.5, roll.choice([None, 1.25])),
            Answered(now.round, of(run, asked[-1], now.round), 0.1),
            Declined(now.round, asked[0], code, "x", Short(5, 1.5, None) if code == "memory" else None, "boot 1"),
            Rejected(now.round, asked[0], "not finite"),
            Extended(now.round),
            Reopened(now.round, now.attempt + 1),
        ]
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_snapshot_and_the_facts_behind_it_come_to_what_the_whole_log_comes_to(
    often: Callable[[], Store], seed: int
) -> None:
    """Facts of every kind in any order that is allowed; it is compared after each fact."""
    roll, made = random.Random(seed), Run(often())
    kinds, used = set(), 0
    while len(made.standing.rounds.history) < 3 or made.standing.facts < 60:
        fact = any_fact(roll, made.id, made.standing.rounds)
        made.record(fact)
        kinds.add(type(fact).__name__)
        standing, upto = taken_up(made.store, made.id, made.plan)
        assert standing == whole(made.store, made.id, made.plan)
        used += upto > 0
    assert used > 20
    assert {"Answered", "Committed", "Asked"} <= kinds


def test_a_snapshot_is_kept_once_enough_facts_have_come_and_at_the_end(tmp_path: Path) -> None:
    """A round of few boards leaves a dozen facts; to write them all anew each time would cost more than it saves."""
    with Store(tmp_path, every=20) as store:
        made = Run(store)
        made.record(Started(BLOB), Surveyed(0, DEVICES))
        upto = []
        for number in range(6):
            made.round(number, *DEVICES)
            upto.append(store.snapshots.of(made.id, made.plan, 0.0)[1])
        assert upto == [
            0,
            0,
            29,
            29,
            29,
            56,
        ]  # 2 facts, and 9 a round: 20 and one for each of 6 boards from one to the next
        made.record(Ended("stopped"))
        assert store.snapshots.of(made.id, made.plan, 0.0)[1] == 57


def test_nothing_is_kept_of_facts_that_are_not_written_yet(often: Callable[[], Store]) -> None:
    """A snapshot that rests on them would outlive them where the process is killed."""
    made = Run(often())
    with made.store.together():
        made.record(Started(BLOB))
        made.round(0, "a")
        assert made.store.snapshots.of(made.id, made.plan, 0.0)[1] == 0
    made.round(1, "a")
    assert made.store.snapshots.of(made.id, made.plan, 0.0)[1] == 9


def test_nothing_is_kept_of_a_log_to_which_another_process_has_written(often: Callable[[], Store]) -> None:
    """The state of this process is not what that log comes to."""
    made, other = Run(often()), often()
    made.record(Started(BLOB))
    other.append(made.id, Surveyed(0, ("z",)))
    made.round(0, "a")
    assert made.store.snapshots.of(made.id, made.plan, 0.0)[1] == 0


# -- what does not fit ----------------------------------------------------------------------------


def edited(home: Path, statement: str, *values: object) -> None:
    db = sqlite3.connect(home / "fedquilt.db")
    db.execute(statement, values)
    assert db.total_changes or statement.startswith("drop")
    db.commit()
    db.close()


@pytest.mark.parametrize(
    "change",
    ["body = substr(body, 1, length(body) / 2)", "body = x'00'", "log = x'00'", "sum = 'text'", "version = '9.9 1'"],
)
def test_a_damaged_snapshot_is_passed_over_by_name_and_made_anew(
    run: Run, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut short, or changed: the log is read from its first fact, and the next round has a snapshot that fits."""
    edited(run.store.home, f"update snapshots set {change}")
    assert behind(run) == run.standing.facts
    assert [record.getMessage() for record in caplog.records] == [
        f"the snapshot of {run.id} in {run.store.home} is passed over, and its log read from the first fact: "
        "it is not what was written"
    ]
    run.record(Closed(3), Committed(3, state(3), False, {}))
    assert behind(run) == 0


def test_a_snapshot_of_another_version_is_passed_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rules may come to another state; the version that wrote it still takes it."""
    monkeypatch.setattr(snapshots, "VERSION", "9.9.9 1")
    assert behind(run) == run.standing.facts
    monkeypatch.undo()
    assert behind(run) == 2


def test_a_snapshot_beyond_its_log_is_passed_over(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """A log that was put back from an older copy: the run goes on from what that says."""
    keep = list(run.store.facts(run.id))[12][0]
    head = run.store._db.execute("select sum from facts where seq = ?", (keep,)).fetchone()[0]
    with run.store._writing():
        run.store._db.execute("delete from facts where seq > ?", (keep,))
        run.store._rows.change(run.id, head=head)
    with Store(run.store.home) as store:
        standing, upto = taken_up(store, run.id, run.plan)
        assert (standing, upto) == (whole(store, run.id, run.plan), 0)
        assert (standing.facts, standing.rounds.round) == (13, 1)
        assert store.held() == {state(0).sha256, *(blob_of(run.id, "a", 1))}
    assert "the log has another fact, or none, where it ends" in caplog.text


def blob_of(run: str, device: str, round: int) -> set[str]:
    return {ref.sha256 for ref in of(run, device, round).bundles.values()}


def test_a_snapshot_of_other_settings_is_passed_over(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Whether a round was the last one is part of the state."""
    assert run.store.snapshots.of(run.id, Plan(0, 99, run.plan.cohort, 0), 0.0)[1] == 0
    assert "settings have changed" in caplog.text


def test_a_home_without_snapshots_is_opened_and_has_them_from_then_on(run: Run) -> None:
    """As earlier versions leave it."""
    edited(run.store.home, "drop trigger snapshots_of_removed_jobs")
    edited(run.store.home, "drop table snapshots")
    assert behind(run) == run.standing.facts
    run.record(Closed(3), Committed(3, state(3), False, {}))
    assert behind(run) == 0


def test_what_is_damaged_before_a_snapshot_keeps_nobody_from_going_on_and_is_found_by_who_reads_it(run: Run) -> None:
    """The facts behind it are compared as ever."""
    edited(run.store.home, "update facts set body = replace(body, '0.5', '0.6') where seq = 5")
    with Store(run.store.home) as store:
        assert taken_up(store, run.id, run.plan)[0] == run.standing
        assert store.unsound() == []
        with pytest.raises(Exception, match="fact 5, or the one before it, is not what was written"):
            list(store.facts(run.id))
    edited(run.store.home, "update facts set body = replace(body, '0.5', '0.6') where seq = 31")
    with Store(run.store.home) as store:
        assert store.unsound() == [run.id]
        with pytest.raises(Exception, match="fact 31, or the one before it, is not what was written"):
            taken_up(store, run.id, run.plan)


# -- what else rests on it ------------------------------------------------------------------------


def test_the_blobs_of_runs_are_known_from_what_has_come_since_the_last_look(run: Run) -> None:
    """The latest state, and the updates that it does not contain; another run's are known beside it."""
    other = Run(run.store)
    other.record(Started(state(77)))
    assert run.store.held() == {state(2).sha256, *blob_of(run.id, "a", 3), state(77).sha256}
    said: list[str] = []
    run.store._db.set_trace_callback(said.append)
    run.record(Answered(3, of(run.id, "b", 3)))
    assert run.store.held(but=other.id) == {state(2).sha256, *blob_of(run.id, "a", 3), *blob_of(run.id, "b", 3)}
    looked = [line for line in said if "from facts" in line and "order by seq" in line]
    assert [f"job = '{other.id}'" in line for line in looked] == [False]
    run.record(Closed(3), Committed(3, state(3), False, {}))
    assert run.store.held() == {state(3).sha256, state(77).sha256}


def test_a_run_that_is_done_has_its_blobs_without_its_facts(often: Callable[[], Store]) -> None:
    """What a start of the coordinator asks of it does not grow with its log."""
    made = Run(often())
    made.record(Started(BLOB))
    made.round(0, "a")
    made.record(Ended("done"))
    later, said = often(), list[str]()
    later._db.set_trace_callback(said.append)
    assert (later.held(), later.unsound()) == ({state(0).sha256}, [])
    assert not [line for line in said if "order by seq" in line]
    assert made.store._db.execute("select length(body) from snapshots").fetchall() == [(0,)]


def test_a_removed_run_takes_its_snapshot_with_it(run: Run) -> None:
    """Also where an earlier version removes it, which knows of none."""
    run.store.remove([run.id])
    assert run.store._db.execute("select count(*) from snapshots").fetchone() == (0,)
    assert run.store.held() == set()


def test_a_snapshot_that_cannot_be_written_is_done_without(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """The facts have been written; nothing needs the snapshot."""
    run.store._db.execute("create temp trigger full before insert on snapshots begin select raise(abort, 'full'); end")
    run.record(Closed(3), Committed(3, state(3), False, {}))
    assert f"no snapshot of {run.id} is kept" in caplog.text
    assert behind(run) == 4


KILLED = """
import os, signal, sys
from pathlib import Path
from fedquilt.coordinator import snapshots
from fedquilt.coordinator.facts import Plan, Rounds, apply
from fedquilt.coordinator.store import Store

store = Store(Path(sys.argv[1]), every=-9)
row = store.jobs()[0]
plan = Plan.of(row.job)
standing, upto = store.snapshots.of(row.id, plan, 7.0)
for _, _, fact in store.facts(row.id, upto):
    standing.take(fact, apply(standing.rounds, fact, 7.0))
store._db.set_trace_callback(lambda said: os.kill(os.getpid(), signal.SIGKILL) if said == "commit" else None)
store.snapshots.keep(row.id, standing)
"""


def test_a_process_that_is_killed_over_a_snapshot_leaves_the_one_before(run: Run) -> None:
    """Killed between its last row and the end of the transaction."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(run.store.home)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert behind(run) == 2


# -- the rules ------------------------------------------------------------------------------------


def test_the_rules_of_the_facts_are_those_that_snapshots_name() -> None:
    """A state that another rule makes of the same facts would be taken for today's: raise `snapshots.RULES` then."""
    roll, now, seen = random.Random(5), Rounds(Plan.of(JOB)), hashlib.sha256()
    sorts = msgspec.json.Encoder(enc_hook=list, order="deterministic")
    for _ in range(400):
        now = apply(now, any_fact(roll, "run", now), 1.0)
        seen.update(sorts.encode(now))
    assert (seen.hexdigest()[:16], snapshots.RULES) == ("31bac301ae09156a", 1)
