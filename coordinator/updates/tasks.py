"""Conversion of a method's `TaskSpec` into a `Task`, with its predicted cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import msgspec

from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.core import Action, BlobRef, DeviceView, Task, TaskSpec, Tensors, WorkEstimate
from fedquilt.core.messages import ADDITIVE_FIELDS
from fedquilt.costs import cost_model

# share of a device's examples that is held out, unless the job sets `DataSpec.held`
DEFAULT_HELD_OUT_SHARE: Final = 0.2


def held_out_share(data: Mapping[str, Any] | None) -> float:
    """Return `held` of a job's [data] table, or DEFAULT_HELD_OUT_SHARE if missing or invalid."""
    share = (data or {}).get("held")
    return float(share) if isinstance(share, int | float) and 0 <= share < 1 else DEFAULT_HELD_OUT_SHARE


class TaskSpecCache:
    def __init__(self, held_out_share: float) -> None:
        self._held_out_share = held_out_share
        # task specs for sites (True) and for other devices (False)
        self._shared_specs: dict[bool, TaskSpec | None] = {}
        # by `id` of a shared task spec, engine, actions and whether epochs may differ
        self._workloads: dict[tuple[int, str, tuple[Action, ...], bool], DeviceWorkload] = {}
        self._latest_task: tuple[Hashable, Task] | None = None  # key and latest task

    def task_spec_for_device(
        self, send: Callable[[Any, DeviceView], TaskSpec | None], state: Any, view: DeviceView, *, common: bool
    ) -> TaskSpec | None:
        """Return the method's task spec or None. With `common`, all sites share one spec, all devices another."""
        if not common:
            return send(state, view)
        is_site = view.profile is not None and view.profile.site_device_count > 0
        if is_site not in self._shared_specs:
            self._shared_specs[is_site] = send(state, view)
        return self._shared_specs[is_site]

    def workload_of_task_spec(
        self, task_spec: TaskSpec, actions: tuple[Action, ...], engine: str, has_unequal_epochs: bool
    ) -> DeviceWorkload:
        if not self._is_shared(task_spec):
            return predict_workload(task_spec, actions, engine, self._held_out_share, has_unequal_epochs)
        key = id(task_spec), engine, actions, has_unequal_epochs
        workload = self._workloads.get(key)
        if workload is None:
            workload = self._workloads[key] = predict_workload(
                task_spec, actions, engine, self._held_out_share, has_unequal_epochs
            )
        return workload

    def reuse_or_build_task(
        self, task_spec: TaskSpec, shared_values: Hashable, make: Callable[[], Task], **device_values: Any
    ) -> Task:
        """Return a device's task, as a copy of the latest task if that has equal `shared_values`.

        Args:
            task_spec: The task spec of the device. Only a spec that devices share can be reused.
            shared_values: The values that determine all shared fields of the task. They include the time, because the
                blobs of an old task may be deleted.
            make: The function that builds the task.
            device_values: The fields that differ between devices.
        """
        if not self._is_shared(task_spec):
            return msgspec.structs.replace(make(), **device_values)
        if self._latest_task is None or self._latest_task[0] != (id(task_spec), shared_values):
            self._latest_task = ((id(task_spec), shared_values), make())
        return msgspec.structs.replace(self._latest_task[1], **device_values)

    def _is_shared(self, task_spec: TaskSpec) -> bool:
        return any(task_spec is spec for spec in self._shared_specs.values())


def make_task(
    task_spec: TaskSpec,
    *,
    store_bundle: Callable[[Tensors | BlobRef], BlobRef],
    actions: tuple[Action, ...],
    engine: str,
    work: WorkEstimate | None = None,
    **fields: Any,
) -> Task:
    """Build the task of a task spec. `store_bundle` stores tensors. `fields` are further fields."""
    return Task(
        actions=actions,
        params=dict(task_spec.params),
        bundles={name: store_bundle(value) for name, value in task_spec.bundles.items()},
        work=predict_work(task_spec, actions, engine) if work is None else work,
        engine=engine,
        **fields,
    )


def predict_work(
    task_spec: TaskSpec, actions: Sequence[Action], engine: str, held_out_share: float = DEFAULT_HELD_OUT_SHARE
) -> WorkEstimate:
    """Predict the work of the given actions of a task spec, labelled with the engine that runs them."""
    work = task_spec.work if "work" in actions else predict_evaluation_work(task_spec, held_out_share)
    if "work" in actions and task_spec.held_out:
        work = _scale_to_held_out(work, work, held_out_share)
    if "work" in actions and "check" in actions:
        work = work.add(predict_evaluation_work(task_spec, held_out_share))
    return msgspec.structs.replace(work, workload=f"{engine}-{work.workload}" if work.workload else "")


def with_epochs(task_spec: TaskSpec | None, epochs: int | None) -> TaskSpec | None:
    if task_spec is None or epochs is None:
        return task_spec
    work = cost_model.repeat_work(task_spec.work, epochs / task_spec.params["epochs"])
    return dataclasses.replace(task_spec, params={**task_spec.params, "epochs": epochs}, work=work)


def predict_workload(
    task_spec: TaskSpec, actions: Sequence[Action], engine: str, held_out_share: float, has_unequal_epochs: bool
) -> DeviceWorkload:
    """Predict the workload of a task spec, with its epochs if devices may train for unequal numbers."""
    work = predict_work(task_spec, actions, engine, held_out_share)
    workload = DeviceWorkload(work, bytes=total_blob_bytes(task_spec))
    epochs = int(task_spec.params.get("epochs", 0)) if has_unequal_epochs and "work" in actions else 0
    if not epochs:
        return workload
    return workload._replace(epochs=epochs, epoch=cost_model.repeat_work(task_spec.work, 1 / epochs))


def predict_evaluation_work(task_spec: TaskSpec, held_out_share: float = DEFAULT_HELD_OUT_SHARE) -> WorkEstimate:
    """Predict the work of an evaluation on the held-out examples.

    Without a cost from the method, an evaluation costs a third of a training epoch. An evaluation that adapts the model
    first (Per-FedAvg) costs more.
    """
    if task_spec.check is not None:
        return _scale_to_held_out(task_spec.work, task_spec.check, held_out_share)
    passes = 3 * max(1, int(task_spec.params.get("epochs", 1)))
    return msgspec.structs.replace(
        task_spec.work,
        flops=task_spec.work.flops / passes,
        flops_per_example=task_spec.work.flops_per_example / passes,
        read_bytes=task_spec.work.read_bytes / 3,
    )


def _scale_to_held_out(work: WorkEstimate, per_example: WorkEstimate, held_out_share: float) -> WorkEstimate:
    share = held_out_share / (1 - held_out_share)  # held-out examples per training example
    return msgspec.structs.replace(
        work, **{name: share * getattr(per_example, name) for name in ADDITIVE_FIELDS}, batch=per_example.batch
    )


def total_blob_bytes(task_spec: TaskSpec) -> int:
    refs = {value for value in task_spec.bundles.values() if isinstance(value, BlobRef)}
    bundles = [value for value in task_spec.bundles.values() if not isinstance(value, BlobRef)]
    return sum(ref.size for ref in refs) + tensors.total_bytes(bundles)
