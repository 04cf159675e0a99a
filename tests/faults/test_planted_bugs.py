"""Bugs planted on purpose: at most 200 seeds find each, and a failure is shrunk to a schedule that finds it again."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from fedquilt.blobs import chunks
from fedquilt.blobs.store import BlobStore
from fedquilt.blobs.transfers import Transfers
from fedquilt.coordinator.delivery.executor import TaskDispatcher
from fedquilt.coordinator.jobs.controller import JobController
from fedquilt.coordinator.jobs.job import RunningJob
from fedquilt.coordinator.rounds import decisions, events, job_state, responses
from fedquilt.coordinator.rounds.events import AnyEvent, RoundCommitted
from fedquilt.coordinator.rounds.job_state import JobState
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.updates.aggregation import PartialAggregate
from fedquilt.coordinator.updates.job_blobs import CommitResult
from fedquilt.core import BlobRef, Profile
from fedquilt.edge_agent import state_machine
from fedquilt.edge_agent.agent_state import AgentState
from fedquilt.edge_agent.state_machine import PublishClaim
from fedquilt.host.disk import StrPath, disk_errors
from tests.faults import search
from tests.faults.database import FaultyConnection
from tests.faults.disk import SimDisk
from tests.faults.federation import ScheduleEnvironment
from tests.faults.schedule import FaultSchedule, draw_schedule, parse_schedule

SEEDS = 200
PART = {"devices": 3, "size": 2, "quorum": 1.0, "over_select": 0.0, "deadline_s": 15.0, "beside_s": -1.0, "jobs": 1}
TWICE = {"jobs": 2, "twice_s": 0.0, "beside_s": 3.0}  # the same job twice, and a slow worker
METHODS = ("fedavg", "ditto", "scaffold", "fedrep", "local", "genefl")  # sums of the last one depend on their order
Patch = pytest.MonkeyPatch


def no_sync(patch: Patch) -> None:
    patch.setattr(SimDisk, "sync", lambda self, path: None)
    no_sync_of_the_log(patch)


def no_sync_of_the_log(patch: Patch) -> None:
    patch.setattr(FaultyConnection, "synchronous", property(lambda self: False, lambda self, value: None))


def no_sync_of_files(patch: Patch) -> None:
    plain = SimDisk.sync
    patch.setattr(SimDisk, "sync", lambda self, path: plain(self, path) if self.is_dir(path) else None)


def no_sync_of_folders(patch: Patch) -> None:
    plain = SimDisk.sync
    patch.setattr(SimDisk, "sync", lambda self, path: None if self.is_dir(path) else plain(self, path))


def a_state_after_its_fact(patch: Patch) -> None:
    commit, record, held = RunningJob._compute_commit, RunningJob.record_event, []

    def early(self: RunningJob, rounds: JobState, now_s: float) -> CommitResult:
        done, depot = commit(self, rounds, now_s), self._store.blob_store
        held[:] = [depot.load(done.event.state.sha256)]
        depot.remove_blob(done.event.state.sha256)
        return done

    def late(self: RunningJob, fact: AnyEvent, now_s: float) -> None:
        record(self, fact, now_s)
        if isinstance(fact, RoundCommitted):
            for payload in held:
                self._store.blob_store.store_bytes(payload)

    patch.setattr(RunningJob, "_compute_commit", early)
    patch.setattr(RunningJob, "record_event", late)


def a_torn_private_file(patch: Patch) -> None:
    plain = SimDisk.replace

    def torn(self: SimDisk, source: StrPath, target: StrPath) -> None:
        if Path(target).parent.name != "private":
            return plain(self, source, target)
        self.write(target, self.read(source))
        return self.unlink(source)

    patch.setattr(SimDisk, "replace", torn)


def an_update_folded_twice(patch: Patch) -> None:
    patch.setattr(PartialAggregate, "remaining_devices", lambda self, updates: sorted(updates))


def another_order(patch: Patch) -> None:
    plain = PartialAggregate.remaining_devices
    patch.setattr(PartialAggregate, "remaining_devices", lambda self, updates: plain(self, updates)[::-1])


def no_round_check(patch: Patch) -> None:
    plain = responses._decide_on_announcement

    def offered(job: str, state: Any, arriving: Any, event: responses.UpdateAnnounced) -> responses.Decision:
        if state is not None and event.update.job == job and event.device in state.pending_devices:
            event = replace(event, update=replace(event.update, round=state.round))
        return plain(job, state, arriving, event)

    patch.setattr(responses, "_decide_on_announcement", offered)


def no_chunk_hash(patch: Patch) -> None:
    patch.setattr(
        chunks,
        "is_valid_chunk",
        lambda manifest, index, payload: len(payload) == chunks.chunk_extent(manifest, index)[1],
    )


def no_blob_hash(patch: Patch) -> None:
    no_chunk_hash(patch)

    def put(self: BlobStore, payload: bytes, expected: BlobRef | None = None) -> BlobRef:
        ref = expected or BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
        if not self.has_blob(ref):
            self._store_payload(payload, ref.sha256)
        return ref

    def finish(self: BlobStore, ref: BlobRef) -> None:
        self.disk.sync(self._part_path(ref.sha256))
        self._move_into_place(self._part_path(ref.sha256), ref.sha256)

    patch.setattr(BlobStore, "store_bytes", put)
    patch.setattr(BlobStore, "finish_part", finish)


def an_acknowledgement_before_the_record(patch: Patch) -> None:
    patch.setattr(JobController, "_schedule_action", lambda self, action, now_s: self.carry_out_action(action, now_s))


def a_task_that_stays_due(patch: Patch) -> None:
    plain = TaskDispatcher.take_due_devices

    def due(self: TaskDispatcher, now_s: float) -> list[str]:
        sent = {device: issue.sent_s for device, issue in self._open_tasks.items()}
        found = plain(self, now_s)
        for device in found:
            self._open_tasks[device].sent_s = sent[device]
            self._schedule_repetition(device, self._open_tasks[device].due_s)
        return found

    patch.setattr(TaskDispatcher, "take_due_devices", due)


def an_event_before_its_blobs(patch: Patch) -> None:
    def write(self: Store, rows: Any) -> None:
        if rows:
            with self.open_transaction():
                self._rows.append_events(rows)
            self.blob_store.sync_small_blobs()

    patch.setattr(Store, "_write_events", write)


def a_refusal_kept_after_a_commit(patch: Patch) -> None:
    plain = job_state._clear_round
    patch.setattr(
        job_state,
        "_clear_round",
        lambda state, round: replace(plain(state, round), decline_reasons=state.decline_reasons),
    )


def an_epoch_used_again(patch: Patch) -> None:
    plain = Store.begin_epoch

    def next_epoch(self: Store, above: int = 0) -> int:
        return self._read_epoch() or plain(self, above)

    patch.setattr(Store, "begin_epoch", next_epoch)


def a_deadline_by_the_clock_of_the_process(patch: Patch) -> None:
    plain = decisions.restart_event

    def restarted(state: JobState, now_s: float) -> events.AttemptResumed | None:
        found = plain(state, now_s)
        return found and replace(found, passed_s=0.0)

    patch.setattr(decisions, "restart_event", restarted)


def a_late_profile_that_wakes_nobody(patch: Patch) -> None:
    plain = Server._handle_message

    def said(self: Server, device: str, message: Any, now_s: float) -> None:
        if isinstance(message, Profile):
            return self.registry.update_profile(device, message)
        return plain(self, device, message, now_s)

    patch.setattr(Server, "_handle_message", said)


def a_round_check_off_by_one(patch: Patch) -> None:
    plain = responses._decide_on_announcement

    def offered(job: str, state: Any, arriving: Any, event: responses.UpdateAnnounced) -> responses.Decision:
        if state is not None and event.update.round + 1 == state.round and event.device in state.pending_devices:
            event = replace(event, update=replace(event.update, round=state.round))
        return plain(job, state, arriving, event)

    patch.setattr(responses, "_decide_on_announcement", offered)


def an_outbox_removed_too_early(patch: Patch) -> None:
    settled = AgentState.record_ack

    def settle(self: AgentState, key: Any, accepted: bool, counted: Any) -> None:
        folder = self._entry_folder(key)
        with disk_errors(f"settle {folder}"):
            if self._find_private_state_hash(folder) is None:
                self._remove_outbox_entry(folder)
        return settled(self, key, accepted, counted)

    patch.setattr(AgentState, "record_ack", settle)


def a_refusal_kept_by_its_device(patch: Patch) -> None:
    plain, cleared = state_machine._handle_task, state_machine._handle_cancellation

    def arrived(state: Any, event: Any, now_s: float, reading: Any) -> Any:
        last, task = state.last_decline, event.task
        if last is not None and (last.job, last.round) == (task.job, task.round):
            return state, (PublishClaim(replace(last, attempt=task.attempt)),)
        return plain(state, event, now_s, reading)

    def keep(state: Any) -> Any:
        after, actions = cleared(state)
        return replace(after, last_decline=state.last_decline), actions

    patch.setattr(state_machine, "_handle_task", arrived)
    patch.setattr(state_machine, "_handle_cancellation", keep)


def a_retained_task_that_stays(patch: Patch) -> None:
    patch.setattr(TaskDispatcher, "cancel_task", lambda self, device: self._open.pop(device, None))


def blobs_without_a_pin(patch: Patch) -> None:
    patch.setattr(BlobStore, "_is_pinned", lambda self, sha256: False)


def a_failed_fetch_that_is_remembered(patch: Patch) -> None:
    plain = Transfers._end_transfer

    def end(self: Transfers, key: Any, error: str | None) -> None:
        ref = self._requested[key]
        plain(self, key, error)
        if error is not None and not self._blob_store.has_blob(ref):
            self._requested[key] = ref
            self._keys_by_blob.setdefault(key[1], {})[key] = None

    patch.setattr(Transfers, "_end_transfer", end)


class Planted(NamedTuple):
    """A bug and the schedules that find it.

    Attributes:
        plant: Function that plants the bug.
        near: Seed from which `make test` starts: the first one that finds the bug.
        drawn: Settings and kinds of faults that are fixed, as arguments of `drawn`. Other seeds draw them as well.
    """

    plant: Callable[[Patch], None]
    near: int = 0
    drawn: Mapping[str, Any] = {}


PLANTS = (
    Planted(no_sync),
    Planted(no_sync_of_the_log),
    Planted(no_sync_of_files),
    Planted(no_sync_of_folders),
    Planted(a_state_after_its_fact),
    Planted(a_torn_private_file, 200040),
    Planted(an_update_folded_twice),
    Planted(another_order, 100001),
    Planted(no_round_check, 100017),
    Planted(no_chunk_hash),
    Planted(no_blob_hash),
    Planted(an_acknowledgement_before_the_record),
    Planted(an_event_before_its_blobs),
    Planted(a_refusal_kept_after_a_commit, 300062),
    Planted(an_epoch_used_again, 200000),
    Planted(a_deadline_by_the_clock_of_the_process, 300012, {**PART, "only": ("kill", "slow", "death")}),
    Planted(a_late_profile_that_wakes_nobody, 300049, {"only": ("crash", "noise")}),
    Planted(a_round_check_off_by_one, 100017),
    Planted(an_outbox_removed_too_early),
    Planted(a_refusal_kept_by_its_device, 200000, {"only": ("worker", "refuse", "stop")}),
    Planted(a_retained_task_that_stays),
    Planted(blobs_without_a_pin, 0, TWICE),
    Planted(a_failed_fetch_that_is_remembered, 300018, {"only": ("refuse", "noise")}),
)
each_planted = pytest.mark.parametrize("planted", PLANTS, ids=lambda planted: planted.plant.__name__)
ALL_AWAY = "devices=2 rounds=2 deadline_s=15.0 cut:dev-0,1.5,90.0,1 cut:dev-1,1.5,90.0,1"  # longer than cuts are drawn


@pytest.fixture(scope="module")
def environment() -> Iterator[ScheduleEnvironment]:
    with ScheduleEnvironment() as made:
        yield made


def first(environment: ScheduleEnvironment, planted: Planted, base: int) -> search.FailedSchedule | None:
    for seed in range(base, base + SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            planted.plant(patch)
            found = search.run_plan(environment, draw_schedule(seed, METHODS, **planted.drawn))
        if isinstance(found, search.FailedSchedule):
            require_sound(environment, found.plan)
            return found
    return None


def require_sound(environment: ScheduleEnvironment, plan: FaultSchedule) -> None:
    sound = search.run_plan(environment, plan)
    assert not isinstance(sound, search.FailedSchedule), sound.why


@each_planted
def test_a_planted_bug_is_found(environment: ScheduleEnvironment, planted: Planted) -> None:
    assert first(environment, planted, planted.near) is not None, f"not found from seed {planted.near} on"


@pytest.mark.nightly
@each_planted
def test_a_planted_bug_is_found_from_any_seed_on(environment: ScheduleEnvironment, planted: Planted) -> None:
    base = secrets.randbelow(10**9)
    assert first(environment, planted, base) is not None, f"not found from seed {base} on"


@pytest.mark.parametrize("plant", [no_sync_of_folders, no_round_check], ids=lambda plant: plant.__name__)
def test_what_is_found_is_found_again_by_the_text_of_its_shortest_schedule(
    environment: ScheduleEnvironment, plant: Callable[[Patch], None]
) -> None:
    planted = next(each for each in PLANTS if each.plant is plant)
    found = first(environment, planted, planted.near)
    assert found is not None
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        short = search.shrink_failure(environment, found)
        assert len(short.plan.to_text()) < len(found.plan.to_text())
        assert isinstance(search.run_plan(environment, parse_schedule(short.plan.to_text())), search.FailedSchedule)
    require_sound(environment, short.plan)


def test_a_process_that_keeps_its_processor_busy_is_named(environment: ScheduleEnvironment) -> None:
    with pytest.MonkeyPatch.context() as patch:
        a_task_that_stays_due(patch)
        found = search.run_plan(environment, parse_schedule(ALL_AWAY))
    assert isinstance(found, search.FailedSchedule)
    assert found.why.startswith("coordinator spins: 21 steps at virtual second ")
    require_sound(environment, parse_schedule(ALL_AWAY))
