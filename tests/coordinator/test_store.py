"""What the coordinator has written is there after any crash."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds import Asked, Committed, Ended, Started
from fedquilt.coordinator.store import Store
from fedquilt.core import BlobRef, StoreError


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens stores on one folder, as so many processes would; all are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(Store(tmp_path))


JOB = settings.parse({"name": "digits", "method": "fedavg"})


def test_facts_come_back_in_order_from_another_process_of_the_same_folder(
    tmp_path: Path, opened: Callable[[], Store]
) -> None:
    """A second store on the folder stands for the process after a kill -9."""
    store = opened()
    id = store.add(JOB, tmp_path / "bundle")
    facts = [Started(BlobRef(sha256="a" * 64, size=3)), Asked(0, 0, ("x", "y")), Ended("done")]
    for fact in facts:
        store.append(id, fact)
    again = opened()
    assert [fact for _, _, fact in again.facts(id)] == facts
    assert again.job(id).job == JOB


def test_every_run_has_an_id_of_its_own_and_the_name_means_the_latest(
    tmp_path: Path, opened: Callable[[], Store]
) -> None:
    """Two runs in the same second, too."""
    store = opened()
    first, second = store.add(JOB, tmp_path), store.add(JOB, tmp_path)
    assert first != second
    assert first.startswith("digits-20")
    assert store.job("digits").id == second
    assert store.job(first).id == first
    assert [row.status for row in store.jobs()] == ["queued", "queued"]


def test_only_one_coordinator_holds_a_folder(opened: Callable[[], Store]) -> None:
    """And the next may once it is gone."""
    first, second = opened(), opened()
    assert first.lock()
    assert not second.lock()
    first.close()
    assert second.lock()


def test_the_latest_state_of_every_job_is_known(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """Older states may go."""
    store = opened()
    for letter in "ab":
        id = store.add(JOB, tmp_path)
        store.append(id, Started(BlobRef(sha256=letter * 64, size=3)))
    store.append(id, Committed(0, BlobRef(sha256="c" * 64, size=3), False, {}))
    store.append(id, Ended("done"))
    assert store.states() == {"a" * 64, "c" * 64}


def test_epochs_grow(opened: Callable[[], Store]) -> None:
    """Each start of a coordinator is told apart."""
    assert [opened().next_epoch() for _ in range(3)] == [1, 2, 3]


def test_an_unknown_run_names_those_there_are(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """So that a typing error is seen."""
    store = opened()
    store.add(JOB, tmp_path)
    with pytest.raises(StoreError, match=r"no run 'digit'.*there are: digits-20"):
        store.job("digit")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "home").write_text("")
    with pytest.raises(StoreError, match="cannot use the store"):
        Store(tmp_path / "home")


def test_a_damaged_database_is_an_error_not_a_crash(tmp_path: Path) -> None:
    """Garbage in place of SQLite."""
    (tmp_path / "fedquilt.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="cannot use the store"):
        Store(tmp_path)


def test_a_folder_knows_whether_a_coordinator_holds_it(opened: Callable[[], Store]) -> None:
    """So that nobody waits for one that is gone."""
    holder, asker = opened(), opened()
    assert not asker.served()
    assert holder.lock()
    assert asker.served()
    assert holder.served()
    holder.close()
    assert not asker.served()


def test_the_unfinished_run_of_the_very_same_job_is_found(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """Another bundle is another job; what has ended for good is not taken up again."""
    store = opened()
    run = store.add(JOB, tmp_path / "bundle")
    assert store.unfinished(JOB, tmp_path / "bundle") == run
    assert store.unfinished(JOB, tmp_path / "other") is None
    store.set_status(run, "done")
    assert store.unfinished(JOB, tmp_path / "bundle") is None


def test_a_row_of_another_version_is_named(tmp_path: Path, opened: Callable[[], Store]) -> None:
    """One line that names the run, for every command."""
    store = opened()
    run = store.add(JOB, tmp_path)
    store._db.execute("update jobs set settings = '{}'")
    with pytest.raises(StoreError, match=f"{run} was made by another version"):
        store.jobs()


def test_facts_are_on_disk_before_they_are_acted_on(opened: Callable[[], Store]) -> None:
    """SQLite's FULL (2): also a power cut loses none. A killed process alone would not show it."""
    store = opened()
    assert store._db.execute("pragma synchronous").fetchone() == (2,)
    assert store._db.execute("pragma journal_mode").fetchone() == ("wal",)
