"""State machine of the agent: pure decisions without I/O, clock or randomness.

    (nothing) --TaskReceived--> FETCHING --BlobFetched--> WORKING --TaskCompleted--> in the outbox --UpdateAcked--> gone
                   |                |                       |
                   +----------------+------ decline --------+-- TaskFailed      TaskCancelled or a later task: stopped

One task is open at a time, the latest from the coordinator. Updates in the outbox are never computed again: they are
submitted with growing intervals until the coordinator counts or rejects each. Private state that a round leaves on the
device counts only together with the round's update. While an update with private state is unanswered, the next task of
the same job waits.

A coordinator restored from an older copy of its log requests rounds that this device has already counted. Its epoch,
which grows with every start, identifies it. A task of a later epoch than the counted round is run, and an update
computed from another state is deleted. A task of the same or an earlier epoch is declined with the epoch known here, so
that the coordinator can continue with a later epoch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

import msgspec
from msgspec import field
from msgspec.structs import replace

from fedquilt.core import CODECS, REFETCH, RESEND, BlobRef, Reading, Task, Update, shorten_error
from fedquilt.edge_agent.power.learned_model import LearnedModel
from fedquilt.edge_agent.task import memory_budget
from fedquilt.edge_agent.task.memory_budget import MemoryMargin
from fedquilt.wire import Claim, RefusalCode

Key = tuple[str, int]  # job, round

# -- events ---------------------------------------------------------------------------------------


class SessionStarted(msgspec.Struct, frozen=True):
    """New session with the broker, or restart of the coordinator. Earlier messages may be lost."""


class TaskReceived(msgspec.Struct, frozen=True):
    task: Task
    missing_blobs: frozenset[BlobRef] = frozenset()


class TaskCancelled(msgspec.Struct, frozen=True): ...


class BlobFetched(msgspec.Struct, frozen=True):
    sha256: str
    error: str | None = None


class TaskCompleted(msgspec.Struct, frozen=True):
    update: Update
    has_private_state: bool
    learned_model: LearnedModel = LearnedModel()  # of the task's workload, with this task
    planned_bytes: int | None = None  # peak predicted by the engine, without the bare process


class TaskFailed(msgspec.Struct, frozen=True):
    code: RefusalCode
    reason: str
    ran_out_of_memory: bool = False
    base_bytes: int | None = None  # measured size of the engine without work
    killed_externally: bool = False  # the next attempt may succeed


class UpdateAcked(msgspec.Struct, frozen=True):
    """Coordinator's final answer to an update, counted or rejected. The update then leaves the outbox."""

    key: Key
    accepted: bool
    epoch: int = 0  # epoch of the coordinator that answered
    attempt: int = 0  # attempt of the acknowledged update


class TimerFired(msgspec.Struct, frozen=True): ...


class TaskPauseChanged(msgspec.Struct, frozen=True):
    is_paused: bool


Event = (
    SessionStarted
    | TaskReceived
    | TaskCancelled
    | BlobFetched
    | TaskCompleted
    | TaskFailed
    | UpdateAcked
    | TimerFired
    | TaskPauseChanged
)

# -- actions --------------------------------------------------------------------------------------


class PublishClaim(msgspec.Struct, frozen=True):
    claim: Claim


class FetchBlobs(msgspec.Struct, frozen=True):
    refs: tuple[BlobRef, ...]


class CancelFetch(msgspec.Struct, frozen=True):
    sha256: str


class StartTask(msgspec.Struct, frozen=True):
    task: Task


class StopTask(msgspec.Struct, frozen=True): ...


class SendUpdate(msgspec.Struct, frozen=True):
    update: Update


class DeleteUpdate(msgspec.Struct, frozen=True):
    update: Update


class StoreLearnedCosts(msgspec.Struct, frozen=True):
    learned_models: Mapping[str, LearnedModel]


Action = PublishClaim | FetchBlobs | CancelFetch | StartTask | StopTask | SendUpdate | DeleteUpdate | StoreLearnedCosts

# -- state ----------------------------------------------------------------------------------------


class CountedRound(msgspec.Struct, frozen=True):
    round: int
    epoch: int = 0  # epoch of the coordinator that counted the round


class Capabilities(msgspec.Struct, frozen=True):
    """Capabilities and labels of a device. While the agent runs, only `runs_on` changes."""

    budget_bytes: int
    engines: tuple[str, ...]
    methods: tuple[str, ...]
    codecs: tuple[str, ...] = CODECS
    plugins: Mapping[str, str] = field(default_factory=dict)  # from `fedquilt.plugins.plugin_fingerprints`
    sandbox_restrictions: tuple[str, ...] | None = None  # from `task.sandbox`, or None without a process
    labels: tuple[str, ...] = ()  # set by the owner (`fedquilt.formats.labels`)
    site_device_count: int = 0  # number of a site's devices, or 0 without a site
    runs_on: Mapping[str, str] = field(default_factory=dict)  # engine that may use a GPU -> provider of its latest task


class OpenTask(msgspec.Struct, frozen=True):
    task: Task
    missing_blobs: frozenset[BlobRef]
    due_s: float = math.inf  # deadline by this device's clock, set when the task first arrived
    is_running: bool = False
    down_bytes: int = 0  # size of the fetched blobs
    retry_blobs: frozenset[BlobRef] = frozenset()  # failed part of `missing_blobs`, fetched again at `retry_s`
    retry_s: float = math.inf
    fetch_failures: int = 0  # since the latest fetched blob
    kill_count: int = 0  # kills of its process from outside


class OutboxUpdate(msgspec.Struct, frozen=True):
    update: Update
    has_private_state: bool
    resend_s: float
    send_count: int = 0  # submissions in this session
    first_sent_s: float | None = None  # None before this process started


class DeviceState(msgspec.Struct, frozen=True):
    capabilities: Capabilities
    open_task: OpenTask | None = None
    outbox: Mapping[Key, OutboxUpdate] = field(default_factory=dict)
    counted_rounds: Mapping[str, CountedRound] = field(default_factory=dict)  # by job
    last_decline: Claim | None = None  # repeated if its task arrives again
    base_bytes: Mapping[str, int] = field(default_factory=dict)  # engine -> resident size without work
    learned_models: Mapping[str, LearnedModel] = field(default_factory=dict)  # by `workload_key`, the latest is last
    # By job: seconds from submission to acknowledgement of the latest updates.
    upload_times_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    memory_margins: Mapping[tuple[str, str], MemoryMargin] = field(default_factory=dict)  # by method and engine
    is_paused: bool = False  # no task is started now


def workload_key(task: Task) -> str:
    return " ".join(filter(None, (task.engine, task.method, task.work.workload)))


MAX_JOBS: Final = 64
MAX_WORKLOADS: Final = 16  # workloads with learned models
MAX_UPLOAD_TIMES: Final = 3  # per job: the median of three ignores one outage
MAX_RESERVED_FRACTION: Final = 0.5  # limit of the time reserved for the upload, as a share of the remaining time
COUNTED_REASON: Final = "round is counted already: the message is old, or the coordinator's log is an older copy"
MAX_KILLS: Final = 2  # limit of restarts of a task whose process was killed from outside

Step = tuple[DeviceState, tuple[Action, ...]]


def next_due_s(state: DeviceState) -> float:
    """Return the time at which `advance` may act without an event, or infinity."""
    retry_s = state.open_task.retry_s if state.open_task else math.inf
    return min([retry_s, *(entry.resend_s for entry in state.outbox.values())]) if state.outbox else retry_s


def advance(state: DeviceState, event: Event, now_s: float, reading: Reading = Reading()) -> Step:
    """Return the next state after an event, and the actions to carry out in order.

    `reading.available_bytes` is the memory that the board could give to a task's process.
    """
    match event:
        case TaskReceived():
            return _handle_task(state, event, now_s, reading)
        case TaskCancelled():
            return _handle_cancellation(state)
        case BlobFetched():
            return _handle_fetched(state, event, now_s)
        case TaskCompleted():
            return _handle_completion(state, event, now_s)
        case TaskFailed() if state.open_task is not None:
            return _handle_failure(state, state.open_task, event)
        case UpdateAcked():
            return _handle_ack(state, event, now_s)
        case SessionStarted():
            outbox = {key: replace(entry, resend_s=now_s, send_count=0) for key, entry in state.outbox.items()}
            return _repeat_due_actions(replace(state, outbox=outbox), now_s)
        case TimerFired():
            return _repeat_due_actions(state, now_s)
        case TaskPauseChanged():
            return _start_if_ready(replace(state, is_paused=event.is_paused))
        case _:
            return state, ()


# -- a task arrives -------------------------------------------------------------------------------


def _handle_task(state: DeviceState, event: TaskReceived, now_s: float, reading: Reading) -> Step:
    task, open_task = event.task, state.open_task
    key = (task.job, task.round)
    if key in state.outbox and state.outbox[key].update.state == task.state:
        entry = state.outbox[key]
        update = replace(entry.update, attempt=task.attempt, epoch=max(task.epoch, entry.update.epoch))
        resubmitted = _with_submission_counted(replace(entry, update=update, send_count=0), now_s)
        return replace(state, outbox={**state.outbox, key: resubmitted}), (SendUpdate(update),)
    counted_round = state.counted_rounds.get(task.job)
    if counted_round is not None and task.round <= counted_round.round and task.epoch <= counted_round.epoch:
        claim = replace(_acceptance_claim(state, task), accepted=False, code="counted", reason=COUNTED_REASON)
        return state, (PublishClaim(claim),)  # the coordinator ignores this claim if the message was old
    if open_task is not None and open_task.task.job == task.job and _task_order(open_task.task) > _task_order(task):
        return state, ()  # the open task is newer
    if open_task is not None and _is_same_work(open_task.task, task):
        # A repeated message has the deadline of the first.
        due_s = open_task.due_s if task == open_task.task else now_s + task.deadline_s
        return replace(state, open_task=replace(open_task, task=task, due_s=due_s)), (
            PublishClaim(_acceptance_claim(state, task)),
        )
    acceptance = _acceptance_claim(state, task)
    if state.last_decline is not None and acceptance == replace(
        state.last_decline, accepted=True, code="ok", reason=""
    ):
        return state, (PublishClaim(state.last_decline),)
    stale_entry = state.outbox.get(key)  # computed from the state of another copy of the coordinator's log
    if stale_entry is not None:
        state = replace(
            state, outbox={other_key: entry for other_key, entry in state.outbox.items() if other_key != key}
        )
    refusal = decline_reason(state, task, reading)
    if refusal is None:
        next_state, actions = _accept_task(state, event, now_s)
    else:
        next_state, actions = _decline_task(state, task, *refusal)
    return next_state, actions if stale_entry is None else (DeleteUpdate(stale_entry.update), *actions)


def decline_reason(state: DeviceState, task: Task, reading: Reading) -> tuple[RefusalCode, str] | None:
    """Return code and text of the reason why the device cannot run a task, or None if the device can."""
    capabilities = state.capabilities
    if task.method not in capabilities.methods:
        return "method", (
            f"method {task.method!r} is not installed on this device: install the coordinator's version of fedquilt, "
            "or the package with this method"
        )
    if task.engine not in capabilities.engines:
        names = ", ".join(capabilities.engines) or "none"
        return "engine", f"engine {task.engine!r} is not installed on this device (installed: {names}): install it"
    if task.wire.codec not in capabilities.codecs:
        names = ", ".join(capabilities.codecs)
        return (
            "codec",
            f"codec {task.wire.codec!r} is unknown here (known: {names}): install the coordinator's fedquilt",
        )
    return memory_budget.memory_shortage(
        task.engine,
        task.work,
        capabilities.budget_bytes,
        reading.available_bytes,
        measured=state.base_bytes,
        margin=_memory_margin(state, task),
    )


def plan_limit_bytes(state: DeviceState, task: Task) -> int:
    """Return the bytes that the engine may plan to use, reduced if earlier tasks exceeded predictions."""
    base = memory_budget.engine_base_bytes(task.engine, state.base_bytes)
    return _memory_margin(state, task).plan_limit_bytes(state.capabilities.budget_bytes, base)


def _memory_margin(state: DeviceState, task: Task) -> memory_budget.MemoryMargin:
    return state.memory_margins.get((task.method, task.engine), memory_budget.MemoryMargin())


def _with_memory_margin(state: DeviceState, task: Task, margin: memory_budget.MemoryMargin) -> DeviceState:
    return replace(state, memory_margins={**state.memory_margins, (task.method, task.engine): margin})


def _with_raised_margin(state: DeviceState, event: TaskFailed) -> DeviceState:
    # An engine that refused before the work started is no reason for a larger margin.
    if state.open_task is None or event.code != "memory" or not event.ran_out_of_memory:
        return state
    return _with_memory_margin(state, state.open_task.task, _memory_margin(state, state.open_task.task).with_failure())


def _accept_task(state: DeviceState, event: TaskReceived, now_s: float) -> Step:
    stop_actions = _stop_actions(state, keep=event.missing_blobs)
    down_bytes, due_s = sum(ref.size for ref in event.missing_blobs), now_s + event.task.deadline_s
    open_task = OpenTask(event.task, event.missing_blobs, due_s, down_bytes=down_bytes)
    fetching_blobs = state.open_task.missing_blobs - state.open_task.retry_blobs if state.open_task else frozenset()
    blobs_to_fetch = _sorted_refs(event.missing_blobs - fetching_blobs)
    fetch = (FetchBlobs(blobs_to_fetch),) if blobs_to_fetch else ()
    state, start_actions = _start_if_ready(replace(state, open_task=open_task, last_decline=None))
    return state, (*stop_actions, PublishClaim(_acceptance_claim(state, event.task)), *fetch, *start_actions)


def _is_same_work(left: Task, right: Task) -> bool:
    return replace(left, attempt=right.attempt, deadline_s=right.deadline_s, epoch=right.epoch) == right


def _task_order(task: Task) -> tuple[int, int]:
    # A restored coordinator begins at an earlier round, with a later epoch.
    return task.epoch, task.round


def _acceptance_claim(state: DeviceState, task: Task) -> Claim:
    claim = Claim(job=task.job, round=task.round, attempt=task.attempt, accepted=True)
    counted_round = state.counted_rounds.get(task.job)
    if counted_round is None or counted_round.round < task.round:
        return claim
    return replace(claim, last_counted_round=counted_round.round, epoch=counted_round.epoch)


def _decline_task(state: DeviceState, task: Task, code: RefusalCode, reason: str) -> Step:
    claim = replace(_acceptance_claim(state, task), accepted=False, code=code, reason=shorten_error(reason))
    return replace(_without_task(state), last_decline=claim), (*_stop_actions(state), PublishClaim(claim))


def _handle_cancellation(state: DeviceState) -> Step:
    """Stop the task, and decline it in case another client of the broker has cleared its topic."""
    claims: tuple[Action, ...] = ()
    if state.open_task is not None:
        reason = "the task's topic was cleared by the coordinator or another client of the broker"
        claim = replace(_acceptance_claim(state, state.open_task.task), accepted=False, code="cleared", reason=reason)
        claims = (PublishClaim(claim),)
    return replace(_without_task(state), last_decline=None), (*_stop_actions(state), *claims)


def upload_reserve_s(state: DeviceState, now_s: float) -> float:
    """Return the seconds before the current task's deadline that are reserved for its upload.

    The reserve is the median time of the job's latest uploads. Before the first upload, the time since the task arrived
    is used if blobs had to be fetched. At most half of the remaining time is reserved.
    """
    open_task = state.open_task
    if open_task is None or not math.isfinite(open_task.due_s):
        return 0.0
    fetch_s = now_s - (open_task.due_s - open_task.task.deadline_s) if open_task.down_bytes else 0.0
    upload_times_s = state.upload_times_s.get(open_task.task.job)
    import statistics  # imported here to save 0.3 MB in an idle agent

    return min(
        statistics.median(upload_times_s) if upload_times_s else fetch_s,
        MAX_RESERVED_FRACTION * max(open_task.due_s - now_s, 0.0),
    )


# -- progress of a task ---------------------------------------------------------------------------


def _handle_fetched(state: DeviceState, event: BlobFetched, now_s: float) -> Step:
    open_task = state.open_task
    refs = [ref for ref in open_task.missing_blobs if ref.sha256 == event.sha256] if open_task else []
    if open_task is None or not refs:
        return state, ()
    if event.error is None:
        updated = replace(open_task, missing_blobs=open_task.missing_blobs.difference(refs), fetch_failures=0)
        return _start_if_ready(replace(state, open_task=updated))
    retrying = replace(
        open_task,
        retry_blobs=open_task.retry_blobs.union(refs),
        retry_s=min(open_task.retry_s, now_s + REFETCH.delay_s(open_task.fetch_failures)),
        fetch_failures=open_task.fetch_failures + 1,
    )
    return replace(state, open_task=retrying), ()


def _start_if_ready(state: DeviceState) -> Step:
    open_task = state.open_task
    if open_task is None or open_task.is_running or open_task.missing_blobs or state.is_paused:
        return state, ()
    if any(entry.has_private_state and job == open_task.task.job for (job, _), entry in state.outbox.items()):
        return state, ()
    return replace(state, open_task=replace(open_task, is_running=True)), (StartTask(open_task.task),)


def _measured_bases(state: DeviceState, base_bytes: int | None) -> dict[str, int]:
    bases = dict(state.base_bytes)
    if state.open_task is not None and base_bytes is not None:
        engine = state.open_task.task.engine
        bases[engine] = min(base_bytes, bases.get(engine, base_bytes))
    return bases


def _handle_completion(state: DeviceState, event: TaskCompleted, now_s: float) -> Step:
    update, bases = event.update, _measured_bases(state, event.update.usage.base_bytes)
    store_actions: tuple[Action, ...] = ()
    workload = "" if state.open_task is None else workload_key(state.open_task.task)
    if state.open_task is not None and event.learned_model != state.learned_models.get(workload, LearnedModel()):
        other_models = {name: model for name, model in state.learned_models.items() if name != workload}
        learned_models = dict([*other_models.items(), (workload, event.learned_model)][-MAX_WORKLOADS:])
        state = replace(state, learned_models=learned_models)
        store_actions = (StoreLearnedCosts(learned_models),)
    peak = update.usage.peak_bytes
    if state.open_task is not None and event.planned_bytes is not None and peak is not None:
        # The present process may have been warm, so the base is that of a bare process.
        base = memory_budget.engine_base_bytes(state.open_task.task.engine, bases)
        margin = _memory_margin(state, state.open_task.task).with_peak(peak - base, event.planned_bytes)
        state = _with_memory_margin(state, state.open_task.task, margin)
    entry = _with_submission_counted(OutboxUpdate(update, event.has_private_state, now_s, first_sent_s=now_s), now_s)
    outbox = {**state.outbox, (update.job, update.round): entry}
    return replace(_without_task(state), outbox=outbox, base_bytes=bases), (SendUpdate(update), *store_actions)


def _handle_failure(state: DeviceState, open_task: OpenTask, event: TaskFailed) -> Step:
    """Restart a task whose process was killed from outside, at most MAX_KILLS times, else decline it."""
    # A task whose process was killed by another cause is restarted with the same plan, for a bit-identical result.
    if event.killed_externally and open_task.is_running and open_task.kill_count < MAX_KILLS:
        return _start_if_ready(
            replace(state, open_task=replace(open_task, kill_count=open_task.kill_count + 1, is_running=False))
        )
    kill_note = f" ({open_task.kill_count + 1} times)" if event.killed_externally else ""
    state = replace(_with_raised_margin(state, event), base_bytes=_measured_bases(state, event.base_bytes))
    return _decline_task(state, open_task.task, event.code, f"{event.reason}{kill_note}")


def _handle_ack(state: DeviceState, event: UpdateAcked, now_s: float) -> Step:
    """Remove an update from the outbox and record an accepted round. Ignore acks of earlier updates."""
    job, round = event.key
    entry = state.outbox.get(event.key)
    if entry is not None and event.epoch < entry.update.epoch:
        return state, ()  # from an earlier coordinator, for an earlier update of this round
    if entry is not None and not event.accepted and event.attempt != entry.update.attempt:
        return state, ()  # the round was requested again, and its new update may be counted
    counted_rounds = dict(state.counted_rounds)
    update_epoch = event.epoch if entry is None else entry.update.epoch
    if event.accepted:
        # Removed and inserted again, so that the latest job is last.
        previous = counted_rounds.pop(job, CountedRound(-1))
        # An earlier round replaces the later if a restored coordinator requested that round, but not on a late answer.
        was_repeated = event.epoch > previous.epoch and (round == previous.round or update_epoch > previous.epoch)
        supersedes = round > previous.round or was_repeated
        counted_rounds[job] = CountedRound(round, event.epoch) if supersedes else previous
        counted_rounds = dict(list(counted_rounds.items())[-MAX_JOBS:])
    if event.accepted and entry is not None and entry.first_sent_s is not None:
        upload_times_s = {name: times_s for name, times_s in state.upload_times_s.items() if name != job}
        job_times_s = (*state.upload_times_s.get(job, ()), now_s - entry.first_sent_s)[-MAX_UPLOAD_TIMES:]
        state = replace(state, upload_times_s=dict([*upload_times_s.items(), (job, job_times_s)][-MAX_JOBS:]))
    outbox = {key: entry for key, entry in state.outbox.items() if key != event.key}
    state = replace(state, outbox=outbox, counted_rounds=counted_rounds)
    open_task = state.open_task
    counted_round = None if open_task is None else counted_rounds.get(open_task.task.job)
    if (
        open_task is not None
        and counted_round is not None
        and open_task.task.round <= counted_round.round
        and open_task.task.epoch <= counted_round.epoch
    ):
        return _without_task(state), _stop_actions(state)  # the round was counted while its task ran again
    return _start_if_ready(state)


def _with_submission_counted(entry: OutboxUpdate, now_s: float) -> OutboxUpdate:
    return replace(entry, resend_s=now_s + RESEND.delay_s(entry.send_count), send_count=entry.send_count + 1)


def _repeat_due_actions(state: DeviceState, now_s: float) -> Step:
    if now_s < next_due_s(state):
        return state, ()
    actions: list[Action] = []
    outbox = dict(state.outbox)
    for key, entry in state.outbox.items():
        if entry.resend_s <= now_s:
            outbox[key] = _with_submission_counted(entry, now_s)
            actions.append(SendUpdate(entry.update))
    open_task = state.open_task
    if open_task is not None and open_task.retry_s <= now_s:
        actions.append(FetchBlobs(_sorted_refs(open_task.retry_blobs)))
        open_task = replace(open_task, retry_blobs=frozenset(), retry_s=math.inf)
    return replace(state, outbox=outbox, open_task=open_task), tuple(actions)


def _sorted_refs(refs: Collection[BlobRef]) -> tuple[BlobRef, ...]:
    return tuple(sorted(refs, key=lambda ref: ref.sha256))


def _without_task(state: DeviceState) -> DeviceState:
    return replace(state, open_task=None)


def _stop_actions(state: DeviceState, keep: frozenset[BlobRef] = frozenset()) -> tuple[Action, ...]:
    if state.open_task is None:
        return ()
    cancellations = (CancelFetch(ref.sha256) for ref in _sorted_refs(state.open_task.missing_blobs - keep))
    return (*((StopTask(),) if state.open_task.is_running else ()), *cancellations)
