"""Conversion of an `TaskSpec` of a method into a `Task`, with its predicted cost."""

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

HELD: Final = 0.2  # share of a device's examples that is held out, where the job does not tell: `DataSpec.held`


def held_out_share(data: Mapping[str, Any] | None) -> float:
    held = (data or {}).get("held")
    return float(held) if isinstance(held, int | float) and 0 <= held < 1 else HELD


class TaskSpecCache:
    """Cache of orders, workloads and tasks that are equal for several devices of a round."""

    def __init__(self, held: float) -> None:
        self._held = held
        self._orders: dict[bool, TaskSpec | None] = {}  # common to all sites (True), or to all other devices (False)
        # of those orders, by their identity
        self._asks: dict[tuple[int, str, tuple[Action, ...], bool], DeviceWorkload] = {}
        self._made: tuple[Hashable, Task] | None = None  # its latest task, and what it follows from

    def task_spec_for_device(
        self, send: Callable[[Any, DeviceView], TaskSpec | None], state: Any, view: DeviceView, *, common: bool
    ) -> TaskSpec | None:
        """Return the method's task spec. With `common`, call `send` once for sites and once for all others."""
        if not common:
            return send(state, view)
        is_site = view.profile is not None and view.profile.site_device_count > 0
        if is_site not in self._orders:
            self._orders[is_site] = send(state, view)
        return self._orders[is_site]

    def workload_of_task_spec(
        self, order: TaskSpec, actions: tuple[Action, ...], engine: str, uneven: bool
    ) -> DeviceWorkload:
        if not self._is_shared(order):
            return predict_workload(order, actions, engine, self._held, uneven)
        key = id(order), engine, actions, uneven
        known = self._asks.get(key)
        if known is None:
            known = self._asks[key] = predict_workload(order, actions, engine, self._held, uneven)
        return known

    def reuse_or_build_task(self, order: TaskSpec, alike: Hashable, make: Callable[[], Task], **own: Any) -> Task:
        """Return the task, copied from the latest if the task spec is the same shared object and `alike` is equal.

        Args:
            order: The order for a device.
            alike: The values behind all shared fields of the task, including the time, as blobs may vanish.
            make: The function that builds the task.
            own: The fields that differ between devices.
        """
        if not self._is_shared(order):
            return msgspec.structs.replace(make(), **own)
        if self._made is None or self._made[0] != (id(order), alike):
            self._made = ((id(order), alike), make())
        return msgspec.structs.replace(self._made[1], **own)

    def _is_shared(self, order: TaskSpec) -> bool:
        return any(order is each for each in self._orders.values())


def make_task(
    order: TaskSpec,
    *,
    blob: Callable[[Tensors | BlobRef], BlobRef],
    actions: tuple[Action, ...],
    engine: str,
    work: WorkEstimate | None = None,
    **named: Any,
) -> Task:
    return Task(
        actions=actions,
        params=dict(order.params),
        bundles={name: blob(value) for name, value in order.bundles.items()},
        work=predict_work(order, actions, engine) if work is None else work,
        engine=engine,
        **named,
    )


def predict_work(order: TaskSpec, actions: Sequence[Action], engine: str, held: float = HELD) -> WorkEstimate:
    """Predict the work of the given actions of a task spec, labelled with the engine that runs them."""
    work = order.work if "work" in actions else predict_evaluation_work(order, held)
    if "work" in actions and order.held_out:
        work = _scale_to_held_out(work, work, held)
    if "work" in actions and "check" in actions:
        work = work.add(predict_evaluation_work(order, held))
    return msgspec.structs.replace(work, workload=f"{engine}-{work.workload}" if work.workload else "")


def with_epochs(order: TaskSpec | None, epochs: int | None) -> TaskSpec | None:
    """Return the order with another number of epochs and its work. None keeps the order."""
    if order is None or epochs is None:
        return order
    work = cost_model.repeat_work(order.work, epochs / order.params["epochs"])
    return dataclasses.replace(order, params={**order.params, "epochs": epochs}, work=work)


def predict_workload(
    order: TaskSpec, actions: Sequence[Action], engine: str, held: float, uneven: bool
) -> DeviceWorkload:
    """Predict the workload of an order. `uneven` is whether the method permits different numbers of epochs."""
    found = DeviceWorkload(predict_work(order, actions, engine, held), bytes=total_blob_bytes(order))
    epochs = int(order.params.get("epochs", 0)) if uneven and "work" in actions else 0
    return found._replace(epochs=epochs, epoch=cost_model.repeat_work(order.work, 1 / epochs)) if epochs else found


def predict_evaluation_work(order: TaskSpec, held: float = HELD) -> WorkEstimate:
    """Predict the work of an evaluation on the held-out examples.

    Without a cost from the method, an evaluation costs a third of a training epoch. An evaluation that adapts the model
    first (Per-FedAvg) costs more.
    """
    if order.check is not None:
        return _scale_to_held_out(order.work, order.check, held)
    passes = 3 * max(1, int(order.params.get("epochs", 1)))
    return msgspec.structs.replace(
        order.work,
        flops=order.work.flops / passes,
        flops_per_example=order.work.flops_per_example / passes,
        read_bytes=order.work.read_bytes / 3,
    )


def _scale_to_held_out(work: WorkEstimate, each: WorkEstimate, held: float) -> WorkEstimate:
    share = held / (1 - held)  # held out for each example that is trained on
    return msgspec.structs.replace(
        work, **{name: share * getattr(each, name) for name in ADDITIVE_FIELDS}, batch=each.batch
    )


def total_blob_bytes(order: TaskSpec) -> int:
    refs = {value for value in order.bundles.values() if isinstance(value, BlobRef)}
    made = [value for value in order.bundles.values() if not isinstance(value, BlobRef)]
    return sum(ref.size for ref in refs) + tensors.total_bytes(made)
