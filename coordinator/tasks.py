"""Conversion of a method's order into a `Task`, with its cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import msgspec

from fedquilt import layer_costs, tensors
from fedquilt.coordinator.deadline import Ask
from fedquilt.core import Action, BlobRef, DeviceView, Order, Task, Tensors, Work, alike
from fedquilt.core.messages import ADDED

HELD: Final = 0.2  # share of a device's examples that is held out, where the job does not tell: `DataSpec.held`


def held_of(data: Mapping[str, Any] | None) -> float:
    """Share of a device's examples that is held out, as far as a job's [data] tells."""
    held = (data or {}).get("held")
    return float(held) if isinstance(held, int | float) and 0 <= held < 1 else HELD


class Common:
    """Orders of a running round that are the same for several devices, made and priced once.

    Args:
        held: share of a device's examples that is held out.
    """

    def __init__(self, held: float) -> None:
        self._held = held
        self._orders: dict[Hashable, Order | None] = {}  # by what the devices have in common
        self._asks: dict[tuple[int, str, tuple[Action, ...], bool], Ask] = {}  # of those orders, by their identity
        self._made: tuple[Hashable, Task] | None = None  # its latest task, and what it follows from

    def order(self, send: Callable[[Any, DeviceView], Order | None], state: Any, view: DeviceView) -> Order | None:
        """Order of a method for a device; None: it has none."""
        common = alike(send)
        if common is None:
            return send(state, view)
        key = common(view)
        if key not in self._orders:
            self._orders[key] = send(state, view)
        return self._orders[key]

    def ask(self, order: Order, actions: tuple[Action, ...], engine: str, uneven: bool) -> Ask:
        """Work of an order on a device with this engine; arguments as of `ask_of`."""
        if not self._common(order):
            return ask_of(order, actions, engine, self._held, uneven)
        key = id(order), engine, actions, uneven
        known = self._asks.get(key)
        if known is None:
            known = self._asks[key] = ask_of(order, actions, engine, self._held, uneven)
        return known

    def task(self, order: Order, alike: Hashable, make: Callable[[], Task], **own: Any) -> Task:
        """Task of an order, made anew unless the one before was of this order and as much `alike`.

        Args:
            order: of a device.
            alike: what decides the fields that devices have in common; among it the time, as blobs may vanish.
            make: builds the message.
            own: fields that are the device's own.
        """
        if not self._common(order):
            return msgspec.structs.replace(make(), **own)
        if self._made is None or self._made[0] != (id(order), alike):
            self._made = ((id(order), alike), make())
        return msgspec.structs.replace(self._made[1], **own)

    def _common(self, order: Order) -> bool:
        return any(order is each for each in self._orders.values())


def make_task(
    order: Order,
    *,
    blob: Callable[[Tensors | BlobRef], BlobRef],
    actions: tuple[Action, ...],
    engine: str,
    work: Work | None = None,
    **named: Any,
) -> Task:
    """Build the task message of an order.

    Args:
        order: of the method.
        blob: stores a bundle's tensors, or finds them; returns their reference.
        actions: "work", "check" or both.
        engine: name of the device's engine that is to be used.
        work: predicted cost, if it is known; None: `work_of`, where HELD of the examples are held out.
        named: the other fields of `Task`.
    """
    return Task(
        actions=actions,
        params=dict(order.params),
        bundles={name: blob(value) for name, value in order.bundles.items()},
        work=work_of(order, actions, engine) if work is None else work,
        engine=engine,
        **named,
    )


def work_of(order: Order, actions: Sequence[Action], engine: str, held: float = HELD) -> Work:
    """Predict the cost of what an order's actions ask for, as work of the engine that carries it out.

    Args:
        order: of the method.
        actions: "work", "check" or both.
        engine: name.
        held: share of a device's examples that is held out.
    """
    work = order.work if "work" in actions else evaluation(order, held)
    if "work" in actions and order.held_out:
        work = _held_out(work, work, held)
    if "work" in actions and "check" in actions:
        work = work.plus(evaluation(order, held))
    return msgspec.structs.replace(work, workload=f"{engine}-{work.workload}" if work.workload else "")


def trained_for(order: Order | None, epochs: int | None) -> Order | None:
    """The order with another number of epochs, and their work; `epochs` None: as it is."""
    if order is None or epochs is None:
        return order
    work = layer_costs.repeated(order.work, epochs / order.params["epochs"])
    return dataclasses.replace(order, params={**order.params, "epochs": epochs}, work=work)


def ask_of(order: Order, actions: Sequence[Action], engine: str, held: float, uneven: bool) -> Ask:
    """What an order asks of a device whose profile is not known; arguments as of `work_of`.

    `uneven`: the method lets devices train for unequal numbers of epochs.
    """
    found = Ask(work_of(order, actions, engine, held), bytes=blob_bytes(order))
    epochs = int(order.params.get("epochs", 0)) if uneven and "work" in actions else 0
    return found._replace(epochs=epochs, epoch=layer_costs.repeated(order.work, 1 / epochs)) if epochs else found


def evaluation(order: Order, held: float = HELD) -> Work:
    """Predict an evaluation's cost from the method's cost of running its network, on the held-out examples.

    Where the method tells none it is a third of a training epoch; one whose evaluation adapts the model first
    (Per-FedAvg) takes more.
    """
    if order.check is not None:
        return _held_out(order.work, order.check, held)
    passes = 3 * max(1, int(order.params.get("epochs", 1)))
    return msgspec.structs.replace(
        order.work,
        flops=order.work.flops / passes,
        flops_per_example=order.work.flops_per_example / passes,
        read_bytes=order.work.read_bytes / 3,
    )


def _held_out(work: Work, each: Work, held: float) -> Work:
    """A task's work if what it does is `each`, on the held-out examples instead of as many as are trained on."""
    share = held / (1 - held)  # held out for each example that is trained on
    return msgspec.structs.replace(work, **{name: share * getattr(each, name) for name in ADDED}, batch=each.batch)


def blob_bytes(order: Order) -> int:
    """Total size of the blobs that a device needs for an order, whether it has them or not."""
    refs = {value for value in order.bundles.values() if isinstance(value, BlobRef)}
    made = [value for value in order.bundles.values() if not isinstance(value, BlobRef)]
    return sum(ref.size for ref in refs) + tensors.total_bytes(made)
