"""A site answers with the sum of its boards, and the bits are those of one coordinator with all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from saved_homes import contents, saved
from sited import federation, list_states, plan

from fedquilt import methods
from fedquilt.coordinator import settings
from fedquilt.coordinator.jobs import retention
from fedquilt.coordinator.rounds.events import AnyEvent, RoundCommitted, TaskDeclined, UpdateAccepted, UpdateRejected
from fedquilt.coordinator.storage import backup
from fedquilt.coordinator.updates import sites
from fedquilt.core import DeviceView, JobError
from fedquilt.edge_agent.task.protocol import WorkResult
from fedquilt.tools.artefacts.export import export_result
from fedquilt.tools.operations.site import STOP_NOTE


def test_a_site_whose_sum_is_of_another_count_is_refused_by_name(tmp_path: Path) -> None:
    table = {"cohort": {"start_devices": 2, "quorum": 0.5, "deadline_s": 60}}
    with federation(plan(tmp_path, rounds=1, **table), (3, 3)) as made:
        worker = made.sites["site-0"].agent.agent.task_runner._worker
        plain = worker.poll_events

        def poll(now_s: float) -> list[Any]:
            return [
                msgspec.structs.replace(event, weight=event.weight - 1) if isinstance(event, WorkResult) else event
                for event in plain(now_s)
            ]

        worker.poll_events = poll  # type: ignore[method-assign]
        assert made.play() == "done"
        (rejected,) = [fact for fact in made.facts if isinstance(fact, UpdateRejected)]
        assert rejected.device == "site-0"
        assert "but its update" in rejected.reason
        assert [fact.update.device for fact in made.facts if isinstance(fact, UpdateAccepted)] == ["site-1"]


def test_a_site_that_is_cut_off_for_an_hour_costs_its_share_alone_and_joins_again(tmp_path: Path) -> None:
    table = {"cohort": {"start_devices": 3, "quorum": 0.6, "deadline_s": 1500}}
    with federation(plan(tmp_path, rounds=8, flops=1e11, **table), (2, 2, 2)) as made:
        answered = lambda: [sorted(each) for each in made.answered.values()]  # noqa: E731
        assert made.play(lambda: len(made.states) == 2) == "running"
        made.cut("site-0")
        cut_s = made.broker.now_s
        assert made.play(lambda: made.broker.now_s >= cut_s + 3600) == "running"
        done = len(made.states)
        assert done >= 4  # rounds went on
        made.join("site-0")
        assert made.play() == "done"
        assert answered()[:2] == [["site-0", "site-1", "site-2"]] * 2
        assert answered()[3:done] == [["site-1", "site-2"]] * (done - 3)
        assert answered()[-1] == ["site-0", "site-1", "site-2"]
        assert not [fact for fact in made.facts if isinstance(fact, UpdateRejected)]
        assert (
            sum(isinstance(fact, UpdateAccepted) for fact in made.below["site-0"]) >= 2 * 3
        )  # its round went on meanwhile


def reached(facts: list[AnyEvent], kind: type, count: int) -> bool:
    return sum(isinstance(fact, kind) for fact in facts) == count


def test_a_site_that_is_killed_goes_on_with_its_round_and_gives_an_answer_again_that_was_lost(tmp_path: Path) -> None:
    flat = list_states(tmp_path / "flat", "scaffold", (), waits=6)
    with federation(plan(tmp_path / "sited", "scaffold", cohort={"start_devices": 2}), (3, 3)) as made:
        below = made.below["site-1"]
        for kind, count in ((UpdateAccepted, 1), (RoundCommitted, 1), (UpdateAccepted, 5), (RoundCommitted, 3)):
            seen = partial(reached, below, kind, count)
            assert made.play(seen) == "running"
            made.kill("site-1")
        assert made.play() == "done"
        assert made.states == flat
        assert sum(isinstance(fact, RoundCommitted) for fact in below) == 3


def checked(folder: Path, split: tuple[int, ...], waits: int, codec: str) -> tuple[list[bytes], list[Any]]:
    table = {"cohort": {"start_devices": waits}, "check": {"every": 1}, "wire": {"codec": codec}}
    with federation(plan(folder, **table), split) as made:
        assert made.play() == "done", made.facts[-1]
        committed = [fact for fact in made.facts if isinstance(fact, RoundCommitted)]
        return made.states, [fact.evaluation for fact in committed]


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_site_evaluates_and_its_boards_pack_what_they_send(tmp_path: Path, codec: str) -> None:
    states, flat = checked(tmp_path / "flat", (), 6, codec)
    assert len(flat) == 4
    assert all(each is not None and each.examples for each in flat)
    below, sited = checked(tmp_path / "sited", (3, 2), 3, codec)
    assert below == states
    assert sited == flat


def test_a_job_of_a_sites_own_is_refused_with_the_place_where_it_belongs() -> None:
    job = settings.parse_job({"name": "own", "method": "fedavg"})
    below = sites.adapt_for_parent(methods.load("fedavg"), job, {})
    with pytest.raises(JobError, match="submit own to the parent coordinator"):
        below.send(sites.SiteJobState(sites.NO_STATE), DeviceView("a", None))


def test_a_run_that_is_stopped_at_a_site_is_told_above_at_once_until_it_is_resumed_there(tmp_path: Path) -> None:
    table = {"cohort": {"start_devices": 2, "quorum": 0.5, "deadline_s": 600}}
    with federation(plan(tmp_path, rounds=8, flops=1e10, **table), (3, 3)) as made:
        store = made._stores["site-0"]
        assert made.play(partial(reached, made.below["site-0"], UpdateAccepted, 4)) == "running"
        store.set_status("job-1", "stopping")
        stopped_s = made.broker.now_s
        assert made.play(lambda: len(made.states) == 4) == "running"
        assert made.broker.now_s < stopped_s + 600
        declined = [fact for fact in made.facts if isinstance(fact, TaskDeclined)]
        assert {fact.device for fact in declined} == {"site-0"}
        assert {fact.reason for fact in declined} == {STOP_NOTE}
        assert made.answered[1] == made.answered[2] == ["site-1"]
        store.set_status("job-1", "running")
        assert made.play() == "done"
        assert sorted(made.answered[7]) == ["site-0", "site-1"]


def test_what_a_sites_boards_fetched_and_sent_is_counted_above_too(tmp_path: Path) -> None:
    with federation(plan(tmp_path / "flat", rounds=1), ()) as made:
        assert made.play() == "done"
        flat = [fact.update for fact in made.facts if isinstance(fact, UpdateAccepted)]
    with federation(plan(tmp_path / "sited", rounds=1, cohort={"start_devices": 2}), (3, 3)) as made:
        assert made.play() == "done"
        sited = [fact.update for fact in made.facts if isinstance(fact, UpdateAccepted)]
    boards = [update.devices_usage for update in sited]
    assert sum(each.down_bytes for each in boards if each) == sum(update.usage.down_bytes for update in flat)
    assert sum(each.up_bytes for each in boards if each) == sum(update.usage.up_bytes for update in flat)
    assert all(
        update.up_bytes == update.usage.up_bytes + update.devices_usage.up_bytes
        for update in sited
        if update.devices_usage
    )
    assert [len(update.site_devices) for update in sited] == [3, 3]


def test_a_backup_of_a_site_holds_the_bundles_of_its_runs(tmp_path: Path) -> None:
    run = "sited-20260101-000000-abcdef"
    with federation(plan(tmp_path, rounds=1, cohort={"start_devices": 1}), (6,), run) as made:
        assert made.play() == "done"
        store = made._stores["site-0"]
        (store.home / "sites" / "deleted-20260101-000000-abcdef").mkdir()
        (store.home / "sites" / "deleted-20260101-000000-abcdef" / "bundle.json").write_text("of no run")
        file = saved(store.home, tmp_path / "backup.tar")
        backup.restore_backup(file, tmp_path / "again")
        found = contents(tmp_path / "again" / "sites")
        assert found == {f"{run}/{path}": held for path, held in contents(store.home / "sites" / run).items()}
        assert f"{run}/bundle.json" in found


def test_a_site_exports_nothing_and_a_deleted_run_leaves_no_folder(tmp_path: Path) -> None:
    run = "sited-20260101-000000-abcdef"
    with federation(plan(tmp_path, rounds=1, cohort={"start_devices": 1}), (6,), run) as made:
        assert made.play() == "done"
        store = made._stores["site-0"]
        with pytest.raises(JobError, match="export at the parent coordinator"):
            export_result(store, run, tmp_path / "out.safetensors")
        assert (store.home / "sites" / run).is_dir()
        store.set_status(run, "stopped")
        retention.remove_runs(store, [run])
        assert not (store.home / "sites" / run).exists()
