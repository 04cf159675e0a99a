"""One run followed fact by fact comes to what the views say of all its facts."""

from __future__ import annotations

from pathlib import Path

import dashes
import pytest
from job_facts import BLOB, summarise_events, whole_round

from fedquilt.coordinator import settings
from fedquilt.coordinator.fleet.device_status import DeviceStatus
from fedquilt.coordinator.rounds.events import CohortSelected, JobStarted
from fedquilt.coordinator.rounds.job_state import JobConstants
from fedquilt.coordinator.storage.store import Store, StoreReader
from fedquilt.coordinator.views import round_outcomes
from fedquilt.tools.operations.dash.run_follower import MIN_ROUNDS, RunFollower, find_round_outcomes

DEVICES = dashes.names(10)


def followed(home: Path, **options: int) -> RunFollower:
    with StoreReader(home) as store:
        found = RunFollower(store.all_jobs()[0], **options)  # type: ignore[arg-type]
        for dated in store.read_events(found.row.id):
            found.add_event(*dated)
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    dashes.add_run(tmp_path, dashes.facts(DEVICES))
    return tmp_path


def test_the_evaluation_after_the_last_round_has_its_name(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        job = settings.parse_job({"name": "j", "method": "fedavg", "rounds": 1, "check": {"every": 1}})
        found = RunFollower(store.find_job(store.add_job(job, tmp_path)))
    names = []
    facts = [
        JobStarted(BLOB),
        *whole_round("a"),
        CohortSelected(1, 0, ("a",)),
    ]
    for seq, fact in enumerate(facts):
        found.add_event(seq, 1.0, fact)
        names.append(found.describe_current_round()["name"])
    assert (names[1], names[-1]) == ("round 1", "final evaluation")


@pytest.mark.parametrize(
    ("cohort", "texts"),
    [
        ({}, {}),
        (
            {"mode": "buffered", "size": 2},
            {
                "a": "updates: 1 (50.0 %), mean age: 0.0 commits",
                "b": "updates: 1 (50.0 %), mean age: 0.0 commits",
            },
        ),
    ],
)
def test_a_buffered_run_has_the_contribution_of_each_device(
    tmp_path: Path, cohort: dict[str, object], texts: dict[str, str]
) -> None:
    with Store(tmp_path) as store:
        job = settings.parse_job({"name": "j", "method": "fedavg", "cohort": cohort})
        found = RunFollower(store.find_job(store.add_job(job, tmp_path)))
    for seq, fact in enumerate([JobStarted(BLOB), *whole_round("a", "b")]):
        found.add_event(seq, 1.0, fact)
    assert found.format_contributions() == texts


def test_it_comes_to_what_the_views_say(home: Path) -> None:
    found = followed(home)
    plain = dashes.facts(DEVICES)
    assert found.parts == round_outcomes.outcomes_by_round(plain, JobConstants.from_job(found.row.job))
    whole = summarise_events(plain).total
    told = found.make_summary()
    assert (told["down_bytes"], told["up_bytes"]) == (whole.down_bytes, whole.up_bytes)
    assert told["joules"] == pytest.approx(whole.energy_j)
    assert told["declined"] == whole.declined == 2
    assert told["done"] == 2
    assert told["metric"]["held_out"] == pytest.approx(0.3)  # evaluated in the second round: after the first


def test_the_round_under_way_says_who_and_why_not(home: Path) -> None:
    now = followed(home).describe_current_round()
    assert (now["round"], now["asked"], now["answered"], now["selected"]) == (3, DEVICES[2:5], 1, 4)
    assert {each["code"]: each["count"] for each in now["counts"]} == {
        "drawn": 4,
        "asked": 3,
        "offline": 2,
        "answered": 1,
    }
    assert now["waits"].startswith("board-00002, board-00003, board-00004, at work for ")


def test_a_board_sees_where_its_time_went(home: Path) -> None:
    turns = followed(home).list_device_rounds(DEVICES[1])
    assert [turn["round"] for turn in turns] == [3, 2, 1]
    parts = [turns[1][f"{name}_s"] for name in ("before", "down", "train", "up", "after")]
    assert parts == pytest.approx([0.0, 4.5, 4.0, 1.5, 6.0], abs=0.1)
    offline = followed(home).list_device_rounds(DEVICES[0])
    assert [turn["text"] for turn in offline] == ["offline"] * 3


def test_early_rounds_are_forgotten_and_can_be_asked_for(tmp_path: Path) -> None:
    facts = dashes.facts(DEVICES, 9)
    dashes.add_run(tmp_path, facts)
    found = followed(tmp_path, max_cells=0)
    whole = round_outcomes.outcomes_by_round(facts, JobConstants.from_job(found.row.job))
    assert sorted(found.parts) == sorted(whole)[-MIN_ROUNDS - 1 :]
    assert len(found.round_times) == MIN_ROUNDS + 1
    assert (found.first_round, found.last_round) == (0, 8)
    for number in whole:
        assert find_round_outcomes(facts, JobConstants.from_job(found.row.job), number) == whole[number]
    assert find_round_outcomes(facts, JobConstants.from_job(found.row.job), 9) is None


def test_a_round_that_nobody_can_be_asked_in_says_whom_it_waits_for(tmp_path: Path) -> None:
    start, survey, *_ = dashes.facts(DEVICES)
    dashes.add_run(tmp_path, [start, type(survey)(0, (), {"offline": tuple(DEVICES)})])
    found = followed(tmp_path)
    assert (found.first_round, found.last_round) == (0, 0)
    assert "0 online" in found.describe_current_round()["waits"]
    assert {part.code for part in found.parts[0].values()} == {"offline"}


def test_a_round_whose_boards_have_gone_offline_names_them_until_the_coordinator_knows_better(tmp_path: Path) -> None:
    start, survey, asked, *_ = dashes.facts(DEVICES)
    gone = type(survey)(0, (), {"offline": tuple(DEVICES)})
    dashes.add_run(tmp_path, [start, survey, asked, gone])
    found = followed(tmp_path)
    assert found.describe_current_round()["asked"]
    assert found.describe_current_round()["waits"].startswith(
        "board-00001, board-00002, board-00003, board-00004, offline, until "
    )
    online = {device: DeviceStatus(device, online=True) for device in DEVICES}
    assert found.describe_current_round(None, online)["waits"] is None
