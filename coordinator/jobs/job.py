"""Active job: the method's state and the job state, both rebuilt from the event log.

Every change goes through `record_event`: the event is written, then applied. The computations of the method are
functions of that state and of blobs on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Final

import msgspec

from fedquilt import metrics
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.device_columns import ELIGIBLE, NEVER, CostColumn, DeviceSet
from fedquilt.coordinator.fleet.registry import DeviceRegistry
from fedquilt.coordinator.rounds import decisions, events
from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.coordinator.rounds.decisions import UpdateValidated, restart_event, to_process_clock
from fedquilt.coordinator.rounds.selection import BUSY, SHARE, DeviceSnapshot, JobRequirements
from fedquilt.coordinator.settings import require_matching_bundle, required_packages
from fedquilt.coordinator.storage.store import Store, StoredJob
from fedquilt.coordinator.updates import job_blobs, tasks, validation
from fedquilt.coordinator.updates.aggregation import (
    Aggregator,
    BaseTensors,
    aggregate_evaluations,
    average_metrics,
    blob_hashes,
    explain_evaluation,
    explain_missing_metrics,
    explain_unchanged_loss,
    total_blob_bytes,
)
from fedquilt.coordinator.updates.job_blobs import CommitResult, Encoded, LoadedState, ModelStates
from fedquilt.core import (
    Action,
    BlobRef,
    DeviceView,
    EvaluationRound,
    Method,
    Profile,
    SiteRight,
    StoreError,
    Task,
    TaskSpec,
    Tensors,
    Update,
    UpdateError,
    UpdateSchema,
    WorkEstimate,
    evaluation,
    seed_deriver,
)
from fedquilt.costs import peak_memory

HELD: Final = 2  # tasks whose encoded tensors are kept, so that blobs common to many devices are encoded once


class RunningJob:
    """Active job, which continues from its event log after `use_loaded_state`.

    States and updates of at least `large_bytes` are kept on disk and handled by a worker. The running attempt has its
    whole deadline again or, with `by_wall`, what is left by the wall clock (`decisions.restart_event`).
    """

    def __init__(
        self,
        row: StoredJob,
        store: Store,
        now_s: float,
        method: Method,
        large_bytes: float = math.inf,
        by_wall: bool = False,
    ) -> None:
        self.id, self.job, self._store, self.method, self._large_bytes = row.id, row.job, store, method, large_bytes
        self.engines = settings.list_engines(row.job, method)
        self.bundle = job_blobs.open_bundle(row.id, row.bundle, row.content, store.depot)
        require_matching_bundle(row.job, self.bundle)
        self._folder = row.bundle
        self._states = ModelStates(row.id, row.job, method, self.bundle, row.bundle, store.depot, large_bytes)
        self.wants = JobRequirements(
            self.engines, row.job.cohort, row.job.wire.codec, tuple(required_packages(row.job, self.bundle).items())
        )
        self.state: Any = None
        self.class_counts: tuple[int, ...] = ()  # in the last evaluation outside of the rounds
        self._sent: set[str] = set()  # sha256 of blobs made for the running round's tasks
        self._encoded: Encoded = {}  # the last of them
        self._losses: dict[int, float] = {}  # round of work -> its loss, since this process took up the job
        self._asks: dict[str, DeviceWorkload] = {}  # device -> its work in the running round
        self._orders: dict[str, TaskSpec] = {}  # device -> its order of the running round, if it has no
        network = self.bundle.meta.get("network", {})
        self._predicts = metrics.task_from_network(network), network.get("classes")
        self._held = tasks.held_out_share(row.job.data)
        self._alike: tasks.TaskSpecCache  # of the running round, as are the next five
        self._common: Mapping[str, Tensors | BlobRef]  # bundles of all its tasks
        self._seeded: Callable[[object], int] | None  # a device's seed
        self._manifests: validation.ManifestValidator | None  # what its updates may hold
        self.aggregator: Aggregator
        self.standing, after = store.snapshots.load_state(self.id, events.JobConstants.from_job(row.job), now_s)
        self.rounds = self.standing.rounds  # state of its rounds
        wall_s = store.depot.disk.wall_clock_s()
        for _, at, fact in store.read_events(self.id, after):
            self._apply_event(fact, events.apply_event(self.rounds, fact, now_s - (wall_s - at) * by_wall))
        self.rounds = self.standing.rounds = to_process_clock(self.rounds, now_s, by_wall)
        self._by_wall = by_wall

    @property
    def is_large_to_load(self) -> bool:
        state_bytes = self.rounds.state.size if self.rounds.state else 0
        return state_bytes + sum(ref.size for ref in self.bundle.files.values()) >= self._large_bytes

    def build_state_loader(self) -> Callable[[], LoadedState]:
        """Return a function, for a worker too, that loads the job's state or creates the first one."""
        return partial(self._states.load_starting_state, self.rounds)

    def use_loaded_state(self, found: LoadedState, now_s: float) -> None:
        if self.rounds.state is None:
            self.record_event(events.JobStarted(found.ref, found.settles), now_s)
        elif self._by_wall and (fact := restart_event(self.rounds, now_s)) is not None:
            self.record_event(fact, now_s)
        self.state = found.state
        self.use_encoded_bundles(found.encoded)
        self._reset_round_caches()

    def record_event(self, fact: events.AnyEvent, now_s: float) -> None:
        after = events.apply_event(self.rounds, fact, now_s)
        self._store.append_event(self.id, fact)
        self._apply_event(fact, after)

    def required_blobs(self) -> set[str]:
        """Return the blobs that the job needs after any next event: bundle, state, partial aggregate."""
        sum = self.rounds.folded.sum if self.rounds.folded else None
        return {ref.sha256 for ref in (self.rounds.state, sum, *self.bundle.files.values()) if ref is not None}

    def build_task(
        self, device: str, engine: str, profile: Profile | None, now_s: float, actions: tuple[Action, ...] | None = None
    ) -> Task | None:
        """Return a device's task in the running round, or None if the method has no work for the device."""
        known = self._asks.get(device)
        kept = self._orders.get(device) if known is not None and known.profile == profile else None
        if (order := kept or self._task_spec_for_device(device, profile)) is None:
            return None
        self._seeded = self._seeded or seed_deriver(self.job.seed, self.job.name, self.rounds.round)
        asked = actions or self.rounds.task_actions
        made = self._alike.reuse_or_build_task(
            order,
            (engine, asked, self.rounds.attempt, self.rounds.remaining_s(now_s), now_s),
            lambda: tasks.make_task(
                order,
                blob=self._store_bundle,
                job=self.id,
                round=self.rounds.round,
                attempt=self.rounds.attempt,
                method=self.job.method,
                engine=engine,
                work=self._workload_of_task_spec(order, engine, asked).work,
                actions=asked,
                seed=0,
                deadline_s=self.rounds.remaining_s(now_s),
                wire=self.job.wire,
                state=self.rounds.state.sha256 if self.rounds.state else "",
                class_shares=self._class_shares() if "check" in asked else None,
            ),
            seed=self._seeded(device),
            tier=peak_memory.tier_from_profile(profile),
            last_counted_round=self.rounds.history.get(device, NEVER).last_round,
        )
        while len(self._encoded) > HELD * len(made.bundles):  # drop the parts that were cut for each device alone
            del self._encoded[next(iter(self._encoded))]
        return made

    def _class_shares(self) -> tuple[float, ...] | None:
        if not self.rounds.plan.class_priors:
            return None
        if self.rounds.ordered is not None:
            return self.rounds.ordered.class_shares
        if self.method.traits.equal_classes:
            return ()
        return evaluation.class_shares(self.class_counts or self.rounds.class_counts)

    def device_workload(self, device: str, profile: Profile | None) -> DeviceWorkload:
        """Return the device's estimated work in the running round, empty if the method has none for the device."""
        known = self._asks.get(device)
        if known is None or known.profile != profile:
            order = self._task_spec_for_device(device, profile)
            known = DeviceWorkload(WorkEstimate(), profile)
            if order is not None:
                able = [engine for engine in self.engines if profile is not None and engine in profile.engines]
                known = self._workload_of_task_spec(
                    order, (able or self.engines)[0], self.rounds.task_actions
                )._replace(profile=profile)
            self._asks[device] = known
            self._orders.pop(device, None)
            if order is not None:
                self._cache_task_spec(device, order)
        return known

    def _workload_of_task_spec(self, order: TaskSpec, engine: str, actions: tuple[Action, ...]) -> DeviceWorkload:
        return self._alike.workload_of_task_spec(
            order, actions, engine, self._active_method is self.method and self.method.traits.unequal_epochs
        )

    def _cache_task_spec(self, device: str, order: TaskSpec) -> None:
        # Orders with tensors of their own are not cached, because they take memory.
        self._common = self._common or order.bundles
        if all(value is self._common.get(name) for name, value in order.bundles.items()):
            self._orders[device] = order

    def describe_coverage(
        self,
        fact: events.CohortSelected,
        seen: Mapping[str, DeviceSnapshot],
        kinds: Mapping[tuple[int, tuple[str, ...]], int],
    ) -> tuple[str, ...]:
        """Return sentences on who can take part in the round. After the first one, none if all devices can."""
        asked = fact.devices[0] if fact.devices else ""
        order = self._task_spec_for_device(asked, seen[asked].profile if asked in seen else None)
        if order is None or fact.attempt or self.rounds.phase != "selecting":
            return ()
        needs = order.work
        if fact.round and all(
            peak_memory.fits_budget(budget, [name for name in self.engines if name in engines], needs)
            for budget, engines in kinds
        ):
            return ()
        fleet = {device: each.profile for device, each in seen.items() if each.online and each.profile is not None}
        if not fleet:
            return ()
        members = [
            peak_memory.TierDevice(profile, self.standing.examples.get(device))
            for device, profile in sorted(fleet.items())
        ]
        found = peak_memory.tier_coverage(members, self.engines, needs)
        return tuple(peak_memory.format_coverage(found, needs))

    def manifest_problem(self, update: Update, profile: Profile | None = None) -> str:
        """Return why an update's manifest is invalid, or "" if valid or not of the running round."""
        if update.device not in self.rounds.asked or update.round != self.rounds.round or update.job != self.id:
            return ""
        if self._manifests is None:
            known = (
                self._active_method.aggregation.schema(self.state)
                if "work" in self.rounds.task_actions
                else UpdateSchema({})
            )
            self._manifests = validation.ManifestValidator(known, self.job.wire)
        return self._manifests.manifest_problem(update, profile.site_device_count if profile else 0)

    def build_validation(
        self,
        device: str,
        update: Update,
        profile: Profile | None,
        now_s: float,
        *,
        large: bool,
        right: SiteRight | None = None,
    ) -> Callable[[], UpdateValidated]:
        """Return a function that validates an update, and returns its valid part or why it is rejected."""
        ask = self.device_workload(device, profile)
        waited_s = now_s - self.rounds.asked_s.get(device, now_s)
        limit_s = validation.longest_work_s(waited_s, self.rounds.max_deadline_s, self.rounds.attempt + 1)
        limit, standing = self.job.cohort.max_examples, self.standing
        weight = standing.weights.largest_allowed(device, limit)
        examples = standing.reported.largest_allowed(device, limit)
        work, check = "work" in self.rounds.task_actions, "check" in self.rounds.task_actions
        priors = self.rounds.plan.class_priors
        bounds = validation.ClaimBounds(ask, limit_s, weight, examples, right, check, *self._predicts, priors)
        take = self.build_update_reader(update, profile, bounds, large=large)

        def validate() -> UpdateValidated:
            odd = ""
            try:
                believed, odd = validation.limit_claims(update, bounds)
                validation.require_plausible(update, bounds, work=work)
                taken, reason = take(believed) if work else believed, ""
            except job_blobs.UnreadableError as error:
                if error.again not in blob_hashes([update]):
                    raise
                self._store.depot.discard_damaged(error.again)  # its device has it still: other sectors may take it
                raise job_blobs.LostUpdateError(device, str(error)) from None
            except (StoreError, job_blobs.LostUpdateError):
                raise
            except Exception as error:  # whatever a device sends, it is the device's update that is refused
                plain = isinstance(error, UpdateError)
                taken, reason = None, str(error) if plain else f"{type(error).__name__}: {error}"
            return UpdateValidated(device, update, taken, reason, ask, odd)

        return validate

    def build_update_reader(
        self, update: Update, profile: Profile | None, bounds: validation.ClaimBounds, *, large: bool = False
    ) -> Callable[[Update], Update]:
        rounds, summing = self.rounds, self.aggregator
        base = self._build_base_finder(update, profile)

        def read(believed: Update) -> Update:
            if large:
                return summing.validate_large_update(believed, base, bounds)
            return summing.read_update(believed, rounds, base, bounds)

        return read

    def _build_base_finder(self, update: Update, profile: Profile | None) -> BaseTensors:
        order = self._task_spec_for_device(update.device, profile) if update.bases else None
        # after a restart
        asked = {self._store_bundle(value).sha256 for value in order.bundles.values()} if order else set()
        return partial(job_blobs.base_tensors, self._store.depot, update, asked | self._sent if update.bases else set())

    def has_updates_to_fold(self) -> bool:
        return self.rounds.phase == "open" and self.aggregator.has_foldable_update(self.rounds)

    def build_fold(self, stored_at: float) -> Callable[[], events.UpdatesAggregated | None]:
        """Return a function with which a worker folds the next accepted update.

        The function returns an event if it has stored the partial aggregate, and None otherwise. The aggregate is
        stored once the updates added since the last time have `stored_at` times its bytes.
        """
        return partial(self.aggregator.fold_next, self.rounds, stored_at)

    def build_commit(self, now_s: float) -> Callable[[], CommitResult]:
        """Return a function that folds the remaining updates and stores the next state, while nothing else folds."""
        return partial(self._compute_commit, self.rounds, now_s)

    def _compute_commit(self, rounds: events.JobState, now_s: float) -> CommitResult:
        state = self.state
        if "work" in rounds.task_actions:
            state = self._active_method.step(state, self.aggregator.take_aggregate(rounds))
            validation.require_finite_state(state, tuple(sorted(rounds.answered)))
        spent, finished, updates = rounds.spent, self.method.is_done(state), rounds.answered.values()
        caveat = events.describe_unmetered_tasks(self.job.stop, spent) if spent.metered or not rounds.round else None
        short = None if finished else describe_early_end(self.method, self.job.method, self.job.rounds, rounds.round)
        means, evaluation = average_metrics(updates), aggregate_evaluations(updates)
        best = rounds.best_after(evaluation) if evaluation is not None else None
        if "work" in rounds.task_actions and not rounds.settling and "loss" in means:
            self._losses[rounds.completed_rounds] = means["loss"]
        unchanged = explain_unchanged_loss(self._losses, self.job.params.get("lr"))
        told = caveat, short, unchanged, *explain_missing_metrics(updates, means), *explain_evaluation(updates)
        fact = events.RoundCommitted(
            round=rounds.round,
            state=job_blobs.store_tensors(self._store.depot, *tensors.split_state(state)),
            finished=finished,
            metrics=means,
            notes=tuple(self.method.explain(state)),
            took_s=now_s - rounds.began_s,
            settled=rounds.settling,
            evaluation=evaluation,
            best=best is not None and best.state == rounds.state,
            warnings=tuple(filter(None, told)),
        )
        del state  # what is stored is loaded instead
        state = self._states.load_state(fact.state, rounds.round, again=True)
        return CommitResult(
            fact, state, job_blobs.encode_common_bundles(self.method, state, fact.state, self._store.depot)
        )

    def use_encoded_bundles(self, found: Encoded) -> None:
        self._encoded = found
        self._sent.update(ref.sha256 for _, ref in found.values())

    def blobs_released_by_commit(self, before: events.JobState) -> set[str]:
        """Return the blobs that only earlier rounds needed: updates, aggregate, bundles, old and best state."""
        best = before.best.state if before.best else None  # a later event may name another one
        refs = [before.state, before.folded.sum if before.folded else None, best]
        return (
            blob_hashes(before.answered.values()) | self.sent_blobs() | {ref.sha256 for ref in refs if ref is not None}
        )

    def sent_blobs(self) -> set[str]:
        return set(self._sent)

    def start_next_round(self, done: CommitResult) -> None:
        self.state = done.state
        for held in (self._sent, self._asks, self._orders):
            held.clear()
        self.use_encoded_bundles(done.encoded)
        self._reset_round_caches()

    def _reset_round_caches(self) -> None:
        self._alike = tasks.TaskSpecCache(self._held)
        self._common, self._seeded, self._manifests = {}, None, None
        known = self._active_method.aggregation.schema(self.state)
        of_update = tensors.total_bytes(known.bundles.values()) if known else 0
        of_state = self.rounds.state.size if self.rounds.state else 0
        largest = max(of_update, of_state, *map(total_blob_bytes, self.rounds.answered.values()))
        large = largest >= self._large_bytes or self.rounds.folded is not None
        self.aggregator = Aggregator(self._store.depot, self._active_method, self.state, self.job, large=large)

    def _task_spec_for_device(self, device: str, profile: Profile | None) -> TaskSpec | None:
        view = DeviceView(device, profile, self.rounds.history.get(device, NEVER))
        active = self._active_method
        common = active is self.method and self.method.common_task
        order = self._alike.task_spec_for_device(active.send, self.state, view, common=common)
        return tasks.with_epochs(order, self.rounds.epochs.get(device))

    @property
    def _active_method(self) -> Method | EvaluationRound:
        return self.method.evaluation_round if self.rounds.settling and self.method.evaluation_round else self.method

    def _apply_event(self, fact: events.AnyEvent, after: events.JobState) -> None:
        for device in fact.epochs if isinstance(fact, events.CohortSelected) else ():
            self._asks.pop(device, None)  # of the job's epochs
        self.standing.apply_event(fact, after)
        self.rounds = after

    def _store_bundle(self, value: Tensors | BlobRef) -> BlobRef:
        """Return the blob of a task's tensors, stored if missing. A file of the job's bundle is restored."""
        if isinstance(value, BlobRef):
            named = {name: ref for name, ref in self.bundle.files.items() if ref == value}
            job_blobs.restore_bundle_files(self.id, self._store.depot, self._folder, named)
            return value
        known = self._encoded.pop(id(value), None)
        if known is None or not self._store.depot.has_blob(known[1]):
            known = (value, job_blobs.store_tensors(self._store.depot, value))
        self._encoded[id(value)] = known  # as the latest
        self._sent.add(known[1].sha256)
        return known[1]


def describe_early_end(method: Method, name: str, rounds: int, round: int) -> str | None:
    """Return a sentence on a job that ends before its method has finished, or None."""
    if method.is_done is Method.is_done or round + 1 < rounds:
        return None
    return f"the job's {rounds} rounds are over before {name} has ended: the result is what it has so far; raise rounds"


def decide_next_event(
    job: RunningJob,
    registry: DeviceRegistry,
    at_work: Collection[str],
    now_s: float,
    busy: AbstractSet[str] = frozenset(),
    most: float = math.inf,
    lost_s: float = 0.0,
    gone: AbstractSet[str] = frozenset(),
) -> events.AnyEvent | None:
    """Return the next event of a job, or None if nothing is due. Changes in eligibility precede a selection."""

    def workload_of(device: str) -> DeviceWorkload:
        return job.device_workload(device, registry.latest_profile(device))

    labels = registry.eligibility(job.wants, now_s)
    free = labels.devices_with(ELIGIBLE)
    if short := decisions.devices_to_skip(job.rounds, free, workload_of, registry.agent_start_key):
        labels, free = labels.with_values(short), free - short
    taken = {device for device in busy if device in free}.difference(at_work)
    state = decisions.delay_attempt(job.rounds, lost_s)
    following = partial(decisions.decide_event, state, now_s, free | at_work, workload_of, taken, gone=gone)
    fact = following(most)
    if not isinstance(fact, events.CohortSelected) and (fact is not None or job.rounds.phase != "selecting"):
        return fact
    spared = _devices_over_share(job, fact, free - taken, most, following)
    # a job that waits does not log each coming and going of other jobs
    if taken and not isinstance(fact, events.CohortSelected):
        taken = {device for device in taken if job.rounds.labels.get(device) == BUSY}
    labels = labels.with_values({**dict.fromkeys(taken, BUSY), **dict.fromkeys(spared, SHARE)})
    costs = registry.energy_costs(now_s) if job.job.cohort.prefer == "energy" else CostColumn()
    noted = decisions.eligibility_event(job.rounds, labels, costs)
    if noted is not None or not isinstance(fact, events.CohortSelected):
        return noted or fact
    coverage = job.describe_coverage(fact, registry.device_views(now_s), registry.kinds)
    return msgspec.structs.replace(fact, coverage=coverage)


def _devices_over_share(
    job: RunningJob,
    fact: events.CohortSelected | None,
    free: DeviceSet,
    most: float,
    unlimited: Callable[[], events.AnyEvent | None],
) -> set[str]:
    """Return the eligible devices that only the submitter's share limit excludes from the cohort."""
    if fact is None:
        noted = {device for device in job.rounds.labels.devices_with(SHARE) if device in free}
        if noted or most >= 1:
            return noted
    elif len(fact.devices) < most:
        return set()
    wider, asked = unlimited(), fact.devices if fact is not None else ()
    return set(wider.devices).difference(asked) if isinstance(wider, events.CohortSelected) else set()
