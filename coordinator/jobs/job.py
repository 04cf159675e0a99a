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
from fedquilt.coordinator.rounds import decisions, events, privacy
from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.coordinator.rounds.job_limits import describe_unmetered_tasks
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, TaskVersion, apply_event
from fedquilt.coordinator.rounds.responses import UpdateValidated
from fedquilt.coordinator.rounds.selection import BUSY, SHARE, SPENT, DeviceSnapshot, JobRequirements
from fedquilt.coordinator.settings import require_matching_bundle, required_packages
from fedquilt.coordinator.storage.store import Store, StoredJob
from fedquilt.coordinator.updates import job_blobs, tasks, validation
from fedquilt.coordinator.updates.aggregation import (
    Aggregator,
    BaseTensors,
    aggregate_evaluations,
    average_metrics,
    blob_hashes,
    describe_early_end,
    explain_evaluation,
    explain_missing_metrics,
    explain_unchanged_loss,
    total_blob_bytes,
)
from fedquilt.coordinator.updates.job_blobs import CommitResult, EarlierStates, EncodedBundles, LoadedState, ModelStates
from fedquilt.coordinator.updates.private_sums import PrivateSums
from fedquilt.core import (
    Action,
    BlobRef,
    DeviceUpdate,
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

CACHED_TASKS: Final = 2  # tasks whose encoded tensors are cached


class RunningJob:
    """Active job, which continues from its event log after `use_loaded_state`.

    States and updates of at least `large_bytes` are kept on disk and handled by a worker. After a restart, the attempt
    of a round has its whole deadline again. With `by_wall`, the time without a coordinator counts as well.
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
        self.bundle = job_blobs.open_bundle(row.id, row.bundle, row.content, store.blob_store)
        require_matching_bundle(row.job, self.bundle)
        self._folder = row.bundle
        self._model_states = ModelStates(
            row.id, row.job, method, self.bundle, row.bundle, store.blob_store, large_bytes
        )
        self._earlier_states = EarlierStates(method, self._model_states)
        self._private_sums = PrivateSums.from_job(row.job, method, lambda: store.load_or_create_secret(row.id))
        self.requirements = JobRequirements(
            self.engines,
            row.job.cohort,
            row.job.wire.codec,
            tuple(required_packages(row.job, self.bundle).items()),
            is_private=row.job.privacy is not None,
        )
        self.state: Any = None
        # held-out examples of each class in the latest evaluation outside of rounds
        self.class_counts: tuple[int, ...] = ()
        self._sent_blobs: dict[str, int] = {}  # sha256 of the open tasks' blobs -> round of the latest such task
        self._encoded_bundles: EncodedBundles = {}  # most recently used bundles
        self._losses: dict[int, float] = {}  # completed rounds -> loss, since the activation of the job
        self._workloads: dict[str, DeviceWorkload] = {}  # device -> workload in the running round
        self._task_specs: dict[str, TaskSpec] = {}  # device -> task spec without tensors of its own
        network = self.bundle.meta.get("network", {})
        self._prediction_task = metrics.task_from_network(network), network.get("classes")
        self._held_out_share = tasks.held_out_share(row.job.data)
        # `_reset_round_caches` sets the next five for each round
        self._task_spec_cache: tasks.TaskSpecCache
        self._common_bundles: Mapping[str, Tensors | BlobRef]  # bundles common to all tasks
        self._device_seed: Callable[[object], int] | None  # function that returns a device's seed
        self._manifest_validator: validation.ManifestValidator | None
        self.aggregator: Aggregator
        self.snapshot, first_event = store.snapshots.load_state(self.id, JobConstants.from_job(row.job), now_s)
        self.job_state = self.snapshot.job_state
        wall_s = store.blob_store.disk.wall_clock_s()
        for _, time_s, event in store.read_events(self.id, first_event):
            self._apply_event(event, apply_event(self.job_state, event, now_s - (wall_s - time_s) * by_wall))
        self.job_state = self.snapshot.job_state = decisions.to_process_clock(self.job_state, now_s, by_wall)
        self._by_wall = by_wall

    @property
    def is_large_to_load(self) -> bool:
        state_bytes = self.job_state.state.size if self.job_state.state else 0
        return state_bytes + sum(ref.size for ref in self.bundle.files.values()) >= self._large_bytes

    def build_state_loader(self) -> Callable[[], LoadedState]:
        """Return a function that loads the job's state, or creates the first one. A worker may call it."""
        return partial(self._model_states.load_starting_state, self.job_state)

    def use_loaded_state(self, loaded: LoadedState, now_s: float) -> None:
        """Start or restart the job with the result of `build_state_loader`, and record the event."""
        if self.job_state.state is None:
            self.record_event(events.JobStarted(loaded.ref, loaded.has_evaluation_rounds), now_s)
        elif self._by_wall and (event := decisions.restart_event(self.job_state, now_s)) is not None:
            self.record_event(event, now_s)
        self.state = loaded.state
        self.use_encoded_bundles(loaded.encoded_bundles)
        self._reset_round_caches()

    def record_event(self, event: events.AnyEvent, now_s: float) -> None:
        """Write an event, then apply it. Raise JobError, without writing, if the job state forbids the event."""
        new_state = apply_event(self.job_state, event, now_s)
        self._store.append_event(self.id, event)
        self._apply_event(event, new_state)

    def required_blobs(self) -> set[str]:
        """Return the sha256 of the blobs of the job's bundle, states and partial aggregate."""
        return _state_blobs(self.job_state) | {ref.sha256 for ref in self.bundle.files.values()}

    def build_task(
        self, device: str, engine: str, profile: Profile | None, now_s: float, actions: tuple[Action, ...] | None = None
    ) -> Task | None:
        """Return a device's open task, or None if the method has no work for the device.

        With `actions`, return a task with these actions on the present state.
        """
        version = self.job_state.task_version(device)
        if actions is None and version.round < self.job_state.round:
            return self._build_earlier_task(device, version, engine, profile, now_s)
        cached_workload = self._workloads.get(device)
        cached_spec = (
            self._task_specs.get(device) if cached_workload is not None and cached_workload.profile == profile else None
        )
        if (task_spec := cached_spec or self._task_spec_for_device(device, profile)) is None:
            return None
        self._device_seed = self._device_seed or seed_deriver(self.job.seed, self.job.name, self.job_state.round)
        task_actions = self.job_state.task_actions if actions is None else actions
        remaining_s = self.job_state.remaining_s(device, now_s)
        version = TaskVersion(self.job_state.round, self.job_state.attempt, self.job_state.state)
        task = self._task_spec_cache.reuse_or_build_task(
            task_spec,
            (engine, task_actions, version.attempt, remaining_s, now_s),
            lambda: self._make_task(task_spec, version, engine, task_actions, remaining_s),
            **self._device_fields(device, profile, self._device_seed(device)),
        )
        # evict bundles made for single devices
        while len(self._encoded_bundles) > CACHED_TASKS * len(task.bundles):
            del self._encoded_bundles[next(iter(self._encoded_bundles))]
        return task

    def _build_earlier_task(
        self, device: str, version: TaskVersion, engine: str, profile: Profile | None, now_s: float
    ) -> Task | None:
        if (task_spec := self._open_task_spec(device, profile)) is None:
            return None
        task = self._make_task(task_spec, version, engine, ("work",), self.job_state.remaining_s(device, now_s))
        device_seed = seed_deriver(self.job.seed, self.job.name, version.round)(device)
        return msgspec.structs.replace(task, **self._device_fields(device, profile, device_seed))

    def _make_task(
        self, task_spec: TaskSpec, version: TaskVersion, engine: str, actions: tuple[Action, ...], deadline_s: float
    ) -> Task:
        return tasks.make_task(
            task_spec,
            store_bundle=partial(self._store_bundle, round=version.round),
            job=self.id,
            round=version.round,
            attempt=version.attempt,
            method=self.job.method,
            engine=engine,
            work=self._workload_of_task_spec(task_spec, engine, actions).work,
            actions=actions,
            seed=0,
            deadline_s=deadline_s,
            wire=self.job.wire,
            state=version.state.sha256 if version.state else "",
            class_shares=self._class_shares() if "check" in actions else None,
        )

    def _device_fields(self, device: str, profile: Profile | None, seed: int) -> dict[str, Any]:
        last_counted_round = self.job_state.history.get(device, NEVER).last_round
        tier = peak_memory.tier_from_profile(profile)
        return {"seed": seed, "tier": tier, "last_counted_round": last_counted_round}

    def _class_shares(self) -> tuple[float, ...] | None:
        """Return the class shares by which devices adjust scores, () if equal, or None without class priors."""
        if not self.job_state.constants.class_priors:
            return None
        if self.job_state.parent_order is not None:
            return self.job_state.parent_order.class_shares
        if self.method.traits.equal_classes:
            return ()
        return evaluation.class_shares(self.class_counts or self.job_state.class_counts)

    def device_workload(self, device: str, profile: Profile | None) -> DeviceWorkload:
        """Return the predicted workload of a device's task, or an empty one if the device gets no task."""
        workload = self._workloads.get(device)
        if workload is None or workload.profile != profile:
            task_spec = self._task_spec_for_device(device, profile)
            workload = DeviceWorkload(WorkEstimate(), profile)
            if task_spec is not None:
                engines = [engine for engine in self.engines if profile is not None and engine in profile.engines]
                engine = (engines or self.engines)[0]
                workload = self._workload_of_task_spec(task_spec, engine, self.job_state.task_actions)
                workload = workload._replace(profile=profile)
            self._workloads[device] = workload
            self._task_specs.pop(device, None)
            if task_spec is not None:
                self._cache_task_spec(device, task_spec)
        return workload

    def _workload_of_task_spec(self, task_spec: TaskSpec, engine: str, actions: tuple[Action, ...]) -> DeviceWorkload:
        return self._task_spec_cache.workload_of_task_spec(
            task_spec, actions, engine, self._active_method is self.method and self.method.traits.unequal_epochs
        )

    def _cache_task_spec(self, device: str, task_spec: TaskSpec) -> None:
        # Task specs with tensors of their own are not cached, because the tensors take memory.
        self._common_bundles = self._common_bundles or task_spec.bundles
        if all(value is self._common_bundles.get(name) for name, value in task_spec.bundles.items()):
            self._task_specs[device] = task_spec

    def describe_coverage(
        self,
        event: events.CohortSelected,
        snapshots: Mapping[str, DeviceSnapshot],
        device_kinds: Mapping[tuple[int, tuple[str, ...]], int],
    ) -> tuple[str, ...]:
        """Return sentences on the devices that can take part in the round, or () for nothing to report.

        Only the first selection of a round is described, and after the first round only if a device cannot take part.
        """
        sample_device = event.devices[0] if event.devices else ""
        task_spec = self._task_spec_for_device(
            sample_device, snapshots[sample_device].profile if sample_device in snapshots else None
        )
        if task_spec is None or event.attempt or self.job_state.phase != "selecting":
            return ()
        work = task_spec.work
        if event.round and all(
            peak_memory.fits_budget(budget, [name for name in self.engines if name in engines], work)
            for budget, engines in device_kinds
        ):
            return ()
        profiles = {
            device: snapshot.profile
            for device, snapshot in snapshots.items()
            if snapshot.online and snapshot.profile is not None
        }
        if not profiles:
            return ()
        devices = [
            peak_memory.TierDevice(profile, self.snapshot.examples_by_device.get(device))
            for device, profile in sorted(profiles.items())
        ]
        return tuple(peak_memory.format_coverage(devices, self.engines, work))

    def manifest_problem(self, update: Update, profile: Profile | None = None) -> str:
        """Return why an update of the running round has an invalid manifest, or ""."""
        is_of_round = (update.job, update.round) == (self.id, self.job_state.task_version(update.device).round)
        if not is_of_round or update.device not in self.job_state.pending_devices:
            return ""
        if self._manifest_validator is None:
            has_work = "work" in self.job_state.task_actions
            schema = self._active_method.aggregation.schema(self.state) if has_work else UpdateSchema({})
            self._manifest_validator = validation.ManifestValidator(schema, self.job.wire)
        return self._manifest_validator.manifest_problem(update, profile.site_device_count if profile else 0)

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
        """Return a function that validates an update. It returns the update to accept, or a reason to reject.

        The function raises LostUpdateError if a blob is lost, and UnreadableError or StoreError if the disk fails.
        """
        workload = self.device_workload(device, profile)
        waited_s = now_s - self.job_state.selected_s.get(device, now_s)
        limit_s = validation.longest_work_s(waited_s, self.job_state.max_deadline_s, self.job_state.attempt + 1)
        limit = self.job.cohort.max_examples
        max_weight = self.snapshot.weights.largest_allowed(device, limit)
        max_examples = self.snapshot.example_counts.largest_allowed(device, limit)
        work, check = "work" in self.job_state.task_actions, "check" in self.job_state.task_actions
        priors, task = self.job_state.constants.class_priors, self._prediction_task
        bounds = validation.ClaimBounds(workload, limit_s, max_weight, max_examples, right, check, *task, priors)
        bounds = bounds._replace(is_new=self.job_state.is_new_contributor(device))
        read_update = self.build_update_reader(update, profile, bounds, large=large)

        def validate() -> UpdateValidated:
            implausible = ""
            try:
                limited_update, implausible = validation.limit_claims(update, bounds)
                validation.require_plausible(update, bounds, work=work)
                valid_part, reason = read_update(limited_update) if work else limited_update, ""
            except job_blobs.UnreadableError as error:
                if error.replaceable_blob not in blob_hashes([update]):
                    raise
                # the device can send the blob again
                self._store.blob_store.discard_damaged(error.replaceable_blob)
                raise job_blobs.LostUpdateError(device, str(error)) from None
            except (StoreError, job_blobs.LostUpdateError):
                raise
            except Exception as error:  # an error in the content rejects the update
                is_expected = isinstance(error, UpdateError)
                valid_part, reason = None, str(error) if is_expected else f"{type(error).__name__}: {error}"
            return UpdateValidated(device, update, valid_part, reason, workload, implausible)

        return validate

    def build_update_reader(
        self, update: Update, profile: Profile | None, bounds: validation.ClaimBounds, *, large: bool = False
    ) -> Callable[[Update], Update]:
        job_state, aggregator = self.job_state, self.aggregator
        find_base = self._build_base_finder(update, profile)

        def read(update: Update) -> Update:
            if large:
                return aggregator.decode_large_update(update, find_base, bounds)
            return aggregator.decode_update(update, job_state, find_base, bounds)

        return read

    def _build_base_finder(self, update: Update, profile: Profile | None) -> BaseTensors:
        task_spec = self._open_task_spec(update.device, profile) if update.bases else None
        # after a restart, `_sent_blobs` is empty
        task_blobs = {self._store_bundle(value).sha256 for value in task_spec.bundles.values()} if task_spec else set()
        return partial(
            job_blobs.base_tensors,
            self._store.blob_store,
            update,
            task_blobs.union(self._sent_blobs) if update.bases else set(),
        )

    def has_updates_to_fold(self) -> bool:
        return self.job_state.phase == "open" and self.aggregator.has_foldable_update(self.job_state)

    def build_fold(self, stored_at: float) -> Callable[[], events.UpdatesAggregated | None]:
        """Return a function with which a worker folds the next accepted update.

        The function returns an event if it has stored the partial aggregate. This happens once the updates added since
        the last time have at least `stored_at` times the bytes of the aggregate.
        """
        return partial(self.aggregator.fold_next, self.job_state, stored_at)

    def build_commit(self, now_s: float) -> Callable[[], CommitResult]:
        """Return a function that folds the remaining updates and stores the next state.

        No other work item of the job may run at the same time.
        """
        return partial(self._compute_commit, self.job_state, now_s)

    def _compute_commit(self, job_state: JobState, now_s: float) -> CommitResult:
        state = self.state
        if "work" in job_state.task_actions:
            total = self.aggregator.take_aggregate(job_state, self._private_sums)
            state = self._active_method.step(state, total)
            validation.require_finite_state(state, tuple(sorted(job_state.accepted_updates)))
        open_versions = map(job_state.task_version, job_state.pending_devices)
        earlier_states = {version.state for version in open_versions if version.state is not None}
        usage, finished, updates = job_state.usage, self.method.is_done(state), job_state.accepted_updates.values()
        reports_usage = usage.metered or not job_state.round
        unmetered_note = describe_unmetered_tasks(self.job.stop, usage) if reports_usage else None
        end_note = describe_early_end(self.method, self.job.method, self.job.rounds, job_state.round)
        early_end_note = None if finished else end_note
        mean_metrics, evaluation = average_metrics(updates), aggregate_evaluations(updates)
        new_best = job_state.best_after(evaluation) if evaluation is not None else None
        if "work" in job_state.task_actions and not job_state.is_evaluation_round and "loss" in mean_metrics:
            self._losses[job_state.completed_rounds] = mean_metrics["loss"]
        unchanged_loss_note = explain_unchanged_loss(self._losses, self.job.params.get("lr"))
        warnings = (
            unmetered_note,
            early_end_note,
            unchanged_loss_note,
            *explain_missing_metrics(updates, mean_metrics),
            *explain_evaluation(updates),
        )
        event = events.RoundCommitted(
            round=job_state.round,
            state=job_blobs.store_tensors(self._store.blob_store, *tensors.split_state(state)),
            finished=finished,
            metrics=mean_metrics,
            notes=tuple(self.method.explain(state)),
            took_s=now_s - job_state.round_started_s,
            is_evaluation_round=job_state.is_evaluation_round,
            evaluation=evaluation,
            best=new_best is not None and new_best.state == job_state.state,
            warnings=tuple(filter(None, warnings)),
            earlier_states=tuple(sorted(earlier_states, key=lambda ref: ref.sha256)),
            spent_epsilon=privacy.spent_epsilon_after_round(job_state),
        )
        del state  # free the memory before the stored state is loaded
        state = self._model_states.load_state(event.state, job_state.round, can_recreate=True)
        return CommitResult(
            event, state, job_blobs.encode_common_bundles(self.method, state, event.state, self._store.blob_store)
        )

    def use_encoded_bundles(self, encoded: EncodedBundles) -> None:
        self._encoded_bundles = encoded
        self._sent_blobs.update(dict.fromkeys((ref.sha256 for _, ref in encoded.values()), self.job_state.round))

    def blobs_released_by_commit(self, previous_state: JobState) -> set[str]:
        """Return the blobs that a commit may have made garbage: updates, aggregate, task bundles and states."""
        best_blobs = {previous_state.best.state.sha256} if previous_state.best else set[str]()
        update_blobs = blob_hashes(previous_state.accepted_updates.values())
        return update_blobs | self.sent_blobs() | _state_blobs(previous_state) | best_blobs

    def sent_blobs(self) -> set[str]:
        return set(self._sent_blobs)

    def start_next_round(self, commit: CommitResult) -> None:
        self.state = commit.state
        earlier_rounds = [version.round for version in self.job_state.earlier_versions.values()]
        oldest_round = min(earlier_rounds, default=self.job_state.round)
        self._sent_blobs = {sha256: round for sha256, round in self._sent_blobs.items() if round >= oldest_round}
        for cache in (self._workloads, self._task_specs):
            cache.clear()
        self.use_encoded_bundles(commit.encoded_bundles)
        self._reset_round_caches()

    def _reset_round_caches(self) -> None:
        self._task_spec_cache = tasks.TaskSpecCache(self._held_out_share)
        self._common_bundles, self._device_seed, self._manifest_validator = {}, None, None
        schema = self._active_method.aggregation.schema(self.state)
        update_bytes = tensors.total_bytes(schema.bundles.values()) if schema else 0
        state_bytes = self.job_state.state.size if self.job_state.state else 0
        largest_bytes = max(update_bytes, state_bytes, *map(total_blob_bytes, self.job_state.accepted_updates.values()))
        large = largest_bytes >= self._large_bytes or self.job_state.partial_aggregate is not None
        self.aggregator = Aggregator(
            self._store.blob_store, self._active_method, self.state, self.job, large=large, rebase=self._rebase_update
        )

    def _rebase_update(self, update: DeviceUpdate) -> DeviceUpdate:
        update = self._earlier_states.rebase_update(update, self.state, self.job_state)
        return update if self._private_sums is None else self._private_sums.clip_update(self.state, update)

    def _task_spec_for_device(self, device: str, profile: Profile | None) -> TaskSpec | None:
        view, method = self._view_device(device, profile), self._active_method
        is_common = method is self.method and self.method.common_task
        task_spec = self._task_spec_cache.task_spec_for_device(method.send, self.state, view, common=is_common)
        return tasks.with_epochs(task_spec, self.job_state.epochs.get(device))

    def _open_task_spec(self, device: str, profile: Profile | None) -> TaskSpec | None:
        version = self.job_state.task_version(device)
        if version.round == self.job_state.round:
            return self._task_spec_for_device(device, profile)
        return self._earlier_states.make_task_spec(version, self._view_device(device, profile))

    def _view_device(self, device: str, profile: Profile | None) -> DeviceView:
        return DeviceView(device, profile, self.job_state.history.get(device, NEVER))

    @property
    def _active_method(self) -> Method | EvaluationRound:
        is_evaluation_round = self.job_state.is_evaluation_round
        return (self.method.evaluation_round if is_evaluation_round else None) or self.method

    def _apply_event(self, event: events.AnyEvent, new_state: JobState) -> None:
        for device in event.epochs if isinstance(event, events.CohortSelected) else ():
            self._workloads.pop(device, None)  # computed for the job's epochs
        self.snapshot.apply_event(event, new_state)
        self.job_state = new_state

    def _store_bundle(self, value: Tensors | BlobRef, round: int | None = None) -> BlobRef:
        if isinstance(value, BlobRef):
            bundle_files = {name: ref for name, ref in self.bundle.files.items() if ref == value}
            job_blobs.restore_bundle_files(self.id, self._store.blob_store, self._folder, bundle_files)
            return value
        encoded = self._encoded_bundles.pop(id(value), None)
        if encoded is None or not self._store.blob_store.has_blob(encoded[1]):
            encoded = (value, job_blobs.store_tensors(self._store.blob_store, value))
        self._encoded_bundles[id(value)] = encoded
        round = self.job_state.round if round is None else round
        self._sent_blobs[encoded[1].sha256] = max(round, self._sent_blobs.get(encoded[1].sha256, 0))
        return encoded[1]


def _state_blobs(job_state: JobState) -> set[str]:
    sum = job_state.partial_aggregate.sum if job_state.partial_aggregate else None
    return {ref.sha256 for ref in (job_state.state, sum, *job_state.earlier_states) if ref is not None}


def decide_next_event(
    job: RunningJob,
    registry: DeviceRegistry,
    working_devices: Collection[str],
    now_s: float,
    busy: AbstractSet[str] = frozenset(),
    max_devices: float = math.inf,
    lost_s: float = 0.0,
    unreachable_devices: AbstractSet[str] = frozenset(),
) -> events.AnyEvent | None:
    """Return the next event of a job, or None if nothing is due.

    Changes of eligibility precede a selection. `busy` are devices reserved for other jobs, and `lost_s` extends the
    deadline. See `decisions.decide_event`.
    """

    def workload_of(device: str) -> DeviceWorkload:
        return job.device_workload(device, registry.latest_profile(device))

    labels = registry.eligibility(job.requirements, now_s)
    free = labels.devices_with(ELIGIBLE)
    if devices_to_skip := decisions.devices_to_skip(job.job_state, free, workload_of, registry.agent_start_key):
        labels, free = labels.with_values(devices_to_skip), free - devices_to_skip
    if spent_devices := privacy.devices_without_budget(job.job_state, free - working_devices):
        labels, free = labels.with_values(dict.fromkeys(spent_devices, SPENT)), free - spent_devices
    busy_devices = {device for device in busy if device in free}.difference(working_devices)
    unleased = free - busy_devices
    held = decisions.devices_to_hold(job.job_state, unleased - working_devices, working_devices, now_s)
    labels = labels.with_values(held)
    state = decisions.delay_attempt(job.job_state, lost_s)
    decide = partial(
        decisions.decide_event,
        state,
        now_s,
        free | working_devices,
        workload_of,
        busy_devices,
        unreachable_devices=unreachable_devices,
        held_devices=held.keys(),
    )
    event = decide(max_devices)
    if not isinstance(event, events.CohortSelected) and (event is not None or job.job_state.phase != "selecting"):
        return event
    over_share = _devices_over_share(job, event, unleased - held, max_devices, decide)
    # a waiting job does not log every change of other jobs' leases
    if busy_devices and not isinstance(event, events.CohortSelected):
        busy_devices = {device for device in busy_devices if job.job_state.eligibility.get(device) == BUSY}
    labels = labels.with_values({**dict.fromkeys(busy_devices, BUSY), **dict.fromkeys(over_share, SHARE)})
    costs = registry.energy_costs(now_s) if job.job.cohort.prefer == "energy" else CostColumn()
    eligibility_change = decisions.eligibility_event(job.job_state, labels, costs)
    if eligibility_change is not None or not isinstance(event, events.CohortSelected):
        return eligibility_change or event
    coverage = job.describe_coverage(event, registry.device_views(now_s), registry.kinds)
    return msgspec.structs.replace(event, coverage=coverage)


def _devices_over_share(
    job: RunningJob,
    event: events.CohortSelected | None,
    free: DeviceSet,
    max_devices: float,
    decide: Callable[[], events.AnyEvent | None],
) -> set[str]:
    """Return the devices missing from the cohort only because of the share limit of its submitter.

    `decide` returns the event that would follow without this limit.
    """
    if event is None:
        recorded_devices = {device for device in job.job_state.eligibility.devices_with(SHARE) if device in free}
        if recorded_devices or max_devices >= 1:
            return recorded_devices
    elif len(event.devices) < max_devices:
        return set()
    larger_cohort = decide()
    if not isinstance(larger_cohort, events.CohortSelected):
        return set()
    return set(larger_cohort.devices).difference(event.devices if event is not None else ())
