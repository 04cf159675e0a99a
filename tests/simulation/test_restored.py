"""A coordinator's home that is an older copy, put back: the job goes on, and says what it does not know."""

import logging
import shutil

import pytest
from homes import Federation, is_commit_of

from fedquilt.coordinator.rounds.events import JobEnded


def put_back(federation: Federation, after: int, until: int) -> None:
    home, copy = federation.folder / "coordinator", federation.folder / "copy"
    federation.run(is_commit_of(after))
    shutil.copytree(home, copy)
    federation.run(is_commit_of(until))
    shutil.rmtree(home)
    copy.rename(home)


def ended(federation: Federation) -> str:
    last = federation.facts()[-1]
    assert isinstance(last, JobEnded), last
    return f"{last.status}: {last.reason}"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    found = {}
    for method in ("fedavg", "scaffold", "local"):
        federation = Federation(tmp_path_factory.mktemp(method), method).create()
        federation.run()
        assert ended(federation) == "done: "
        found[method] = federation.states()
    return found


def test_a_home_that_is_put_back_three_rounds_later_gives_the_same_result(tmp_path, calm, caplog):
    federation = Federation(tmp_path, "fedavg").create()
    put_back(federation, after=2, until=5)
    federation.run()
    assert ended(federation) == "done: "
    assert federation.states() == calm["fedavg"]
    assert federation.notes() == []
    assert "but the event log is at round 4: this home is an older copy" in caplog.text


def test_private_state_of_rounds_that_a_home_does_not_know_begins_anew_where_the_method_allows(tmp_path, calm):
    federation = Federation(tmp_path, "scaffold").create()
    put_back(federation, after=1, until=5)  # of which devices have heard no answer
    federation.run()
    assert ended(federation) == "done: "
    assert len(federation.states()) == len(calm["scaffold"])
    assert federation.states() != calm["scaffold"]
    said = (
        "the private state of {} after round 2 is missing, only that of round 5 exists: starting with new private state"
    )
    assert federation.notes() == [said.format(federation.job)] * 3


def test_private_state_of_the_round_before_is_still_there(tmp_path, calm):
    for method in ("scaffold", "local"):
        federation = Federation(tmp_path / method, method).create()
        put_back(federation, after=2, until=3)
        federation.run()
        assert ended(federation) == "done: "
        assert federation.states() == calm[method]
        assert federation.notes() == []


def test_an_update_of_a_later_round_than_the_homes_costs_nothing(tmp_path, calm):
    for method in ("scaffold", "local"):
        federation = Federation(tmp_path / method, method).create()
        put_back(federation, after=1, until=3)
        federation.run()
        assert ended(federation) == "done: ", method
        assert federation.states() == calm[method], method
        assert federation.notes() == []


def test_a_method_that_allows_no_new_beginning_declines_by_name(tmp_path):
    federation = Federation(tmp_path, "local").create()
    put_back(federation, after=1, until=5)
    federation.run()
    assert "after round 2 is missing, only that of round 5 exists, and local does not allow" in ended(federation)


def test_a_copy_from_before_several_starts_learns_the_epoch_from_its_devices(tmp_path, calm, caplog):
    caplog.set_level(logging.WARNING)
    federation = Federation(tmp_path, "fedavg").create()
    home, copy = tmp_path / "coordinator", tmp_path / "copy"
    federation.run(is_commit_of(1))
    shutil.copytree(home, copy)
    for round in (2, 3, 4):
        federation.run(is_commit_of(round))
    shutil.rmtree(home)
    copy.rename(home)
    federation.run()
    assert ended(federation) == "done: "
    assert federation.states() == calm["fedavg"]
