"""Seeds of failing disks, networks, clocks and processes; what they have found before; every kind of fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedquilt import methods
from tests.faults import search
from tests.faults.federation import ScheduleEnvironment
from tests.faults.schedule import KINDS, LATER, FaultSchedule, parse_schedule

# the first ones, and others for the kinds, methods and codecs that these lack; `make nightly` plays 100,000
SEEDS = (*range(30), 30, 59, 65, 67, 68, 80, 82, 90, 93, 98, 100, 111, 113, 120, 129, 137, 146, 147, 154, 345)
PART = 16  # seeds of one test
HERE = [name for name in search.supported_methods() if "numpy" in methods.load(name).engines]  # what runs without torch

REPLAYS = (
    # a device that had reported a full disk started anew, and counted as full for ever
    "seed=5551208 devices=2 rounds=2 refuse:dev-1,50,30,full crash:dev-1,13,0,0.62,published",
    # the coordinator's folder of blobs had no name on the disk: after a power failure the log named lost states
    "seed=24 devices=2 rounds=1 crash:coordinator,33,1,0.62",
    # the answer to a job's last update was lost, and the job had ended: its board was told that it had not counted
    "seed=47 method=ditto devices=2 rounds=2 crash:dev-0,117,1,0.62",
    # a board that is too slow for a round was asked in each attempt at it, while another one waited
    "seed=436 rounds=2 size=2 deadline_s=4.0 slow:dev-2,5.0",
    # two boards had been silent, and the slow one of them was asked again and again
    "seed=5155 size=2 deadline_s=4.0 slow:dev-2,5.0 cut:dev-0,3.22,15.0,1",
    # a board that was asked is silent in an attempt that asks nobody: its task was due at once all the while
    "seed=92 method=local size=2 deadline_s=4.0 jobs=2 also=fedopt payload=2048 beside_s=3.0 crash:dev-2,77,0,8.0 "
    "jump:coordinator,7.08,100.0,0.0 noise:0.0,20.0,0.4,0.2,0.2,3.0 stop:5.99,1.0",
    # a disk failed in the middle of one job's answer, and the next job's deleted the private state that it had moved
    "seed=26 method=fedpews devices=2 rounds=1 jobs=2 refuse:dev-1,106,1,readonly",
    # a blob could not be read once more when its task began, and the agent ended
    "seed=74 devices=2 rounds=1 jobs=2 refuse:dev-0,78,1,io",
    # an update was refused between two attempts at its round, offered again before the answer came, and counted
    "seed=300581 method=local rounds=1 size=2 deadline_s=4.0 jobs=2 beside_s=0.0 newer:dev-2 cut:dev-1,1.03,30.0,1",
    # a disk failed once when a new state was read back, and the job had failed for good
    "seed=300822 codec=int8 devices=2 rounds=1 refuse:coordinator,128,1,io slow:dev-0,1.5 "
    "jump:coordinator,1.53,100.0,0.0",
    # an update that had counted was damaged, and counted again as its device still had it: this is not twice
    "seed=720235 devices=2 rounds=1 beside_s=3.0 rot:coordinator,2.81,0.9149",
    # a board's disk failed for a moment, and it took its update, which had counted, for lost and settled it
    "seed=730014 codec=int8 rounds=2 size=2 deadline_s=60.0 beside_s=3.0 refuse:dev-0,68,30,io "
    "noise:3.67,2.5,0.4,0.0,0.0,0.0 crash:coordinator,284,1,0.5",
    # a restarted coordinator answered an update of round 0 once more, and its board forgot that rounds 1 and 2 counted
    "seed=259 beside_s=3.0 noise:4.15,20.0,0.1,0.2,0.2,0.0 crash:coordinator,391,1,1.0",
    # a folder could not be synced, and the blob that had just got its name there was taken for stored
    "seed=136 codec=int8 devices=2 rounds=2 payload=2048 beside_s=0.0 jump:dev-0,0.56,0.0,1000000.0 "
    "worker:dev-0,2,killed refuse:dev-1,48,1,readonly cut:dev-0,2.16,30.0,1",
    # the same job twice: one run deleted a blob that the other one's next event named
    "seed=2131 codec=topk rounds=4 size=2 quorum=0.5 over_select=0.5 deadline_s=60.0 jobs=2 twice_s=0.0 beside_s=3.0 "
    "noise:10.61,1.0,0.1,0.0,0.2,0.3",
    "seed=3429 codec=topk rounds=5 jobs=2 twice_s=0.0 beside_s=3.0 crash:coordinator,64,0,0.5,sync",
    # a job's worker had found a state on the disk that another job, which had the same one, then deleted
    "seed=5100077 method=local rounds=2 size=2 deadline_s=4.0 jobs=2 beside_s=3.0 slow:dev-2,10.0",
    # a disk failed while a damaged small blob was put aside, and the coordinator ended by an error without a name
    "seed=8100087 method=ft_part devices=2 beside_s=0.0 refuse:coordinator,297,5,io crash:dev-1,152,1,1.0 "
    "crash:coordinator,39,1,1.0",
    # a disk failed in the middle of a refusal, and the update was offered again of which the disk had a part
    "seed=91253 codec=topk rounds=5 size=2 over_select=0.5 deadline_s=60.0 check=2 jobs=2 twice_s=10.84 beside_s=3.0 "
    "stop:12.28,1.0 refuse:dev-1,106,1,readonly refuse:dev-2,167,5,readonly noise:14.19,5.0,0.1,0.2,0.2,0.3",
    # a home was copied before its job was submitted, or put back after the job's end: the simulator's mistakes
    "seed=9 devices=2 rounds=1 restore:1.99,2.0",
    "seed=45 devices=2 rounds=2 restore:2.6,1.0",
    # nothing goes wrong: two methods side by side, one of them with private state, each as it would be alone
    "method=scaffold also=fedavg jobs=2 rounds=4",
)


@pytest.fixture(scope="module")
def environment() -> Iterator[ScheduleEnvironment]:
    with ScheduleEnvironment() as made:
        yield made


@pytest.fixture(scope="module")
def played() -> list[search.SearchResult]:
    return []


@pytest.mark.parametrize("first", range(0, len(SEEDS), PART))
def test_whatever_goes_wrong_everything_is_as_it_would_have_been(
    environment: ScheduleEnvironment, played: list[search.SearchResult], first: int
) -> None:
    found = search.play_seeds(environment, SEEDS[first : first + PART], among=HERE)
    played.append(found)
    assert not found.failures, "\n".join(line for failure in found.failures for line in failure.to_lines())


def test_every_kind_of_fault_has_happened(played: list[search.SearchResult]) -> None:
    covered = {name for part in played for name in part.covered}
    if sum(part.seeds for part in played) < len(SEEDS):
        pytest.skip("not all seeds were played")
    assert covered >= {"one job", "two jobs at once", "the same job twice", "buffered"}
    assert covered >= KINDS.keys() - set(LATER)
    assert covered >= {"power", "codec int8", "codec topk", "ended by its disk", *(f"method {name}" for name in HERE)}
    assert covered >= {f"crash at {call}" for call in ("read", "write", "sync", "name", "publish", "published")}


@pytest.mark.parametrize("text", REPLAYS)
def test_what_was_found_once_does_not_come_back(environment: ScheduleEnvironment, text: str) -> None:
    schedule = parse_schedule(text)
    if schedule.method not in HERE:
        pytest.importorskip("torch")
    found = search.run_plan(environment, schedule)
    assert not isinstance(found, search.FailedSchedule), found.why


@pytest.mark.parametrize("name", [name for name in search.supported_methods() if name not in HERE])
def test_methods_that_need_torch_take_part_too(environment: ScheduleEnvironment, name: str) -> None:
    plan = FaultSchedule(method=name, devices=2, rounds=2)
    for who, call in (("dev-1", 70), ("coordinator", 90)):
        faulty = parse_schedule(f"{plan.to_text()} crash:{who},{call},1,8.0")
        found = search.run_plan(environment, faulty)
        assert not isinstance(found, search.FailedSchedule), found.why
        assert found["power"] == 1
