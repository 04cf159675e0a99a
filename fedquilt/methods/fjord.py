"""FjORD: every mini-batch trains a part of another width, drawn up to what the device's memory allows.

Paper: Horvath et al., FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout,
NeurIPS 2021 (arXiv 2102.13451), Algorithm 1: a device with the largest width p_max draws p for every step from the
widths up to it, uniformly, and drops all units but the leading ceil(p * C) of each layer; an entry of the new global
model is the mean over the devices that have it.

Before an evaluation, and at the end, each width's statistics are gathered from all devices (`heterofl`).

Deviations: the distillation from p_max to p (section 3.3) is left out. Batch normalisation has one scale for all
widths and statistics by width, as in the paper: those of p_max's steps, which are few and so count more, on the
devices whose p_max it is (`heterofl`). A step at a smaller width still computes p_max's: bytes and memory are p_max's.
p_max follows the device's memory tier, the smallest where it has not reported its memory. The mean is weighted by
examples. With momentum or weight decay a dropped unit moves by those alone. All widths 1 are FedAvg but for those
statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedquilt import tensors
from fedquilt.core import Answer, DeviceView, EvaluationSums, Hooks, Order, Site, Step, Task
from fedquilt.methods import _by_width, fedavg, heterofl
from fedquilt.models.partial import masks, width
from fedquilt.models.partial.masks import Plan


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the widths."""

    rates: heterofl.Rates = (0.2, 0.4, 0.6, 0.8, 1.0)  # P; p_max of devices under 1 GB, from 1, 2, 4 and 8 GB


class Ordered:
    """Hooks that draw a width for every mini-batch.

    Args:
        plan: dependencies between the network's units.
        most: p_max, the width of the network that is trained.
        widths: p, all that may be drawn.
    """

    def __init__(self, plan: Plan, most: float, widths: tuple[float, ...], rng: np.random.Generator) -> None:
        self._plan, self._most, self._widths, self._rng = plan, most, widths, rng
        self.width = most  # of the current step

    def begin(self, module: Any) -> None:
        """Draw the width of the next step."""
        self.width = self._widths[int(self._rng.integers(len(self._widths)))]

    def insert_gates(self, module: Any) -> Any:
        """Insert hooks that set dropped units to 0 for every layer that reads them, and return the module."""
        from torch.nn.modules.batchnorm import _BatchNorm

        from fedquilt.models.networks import tensor_register

        inner = dict(module.named_modules())
        for each in inner.values():
            if isinstance(each, _BatchNorm):
                each.register_forward_pre_hook(self._aside(each.momentum))
        for name, follow in self._plan.follows.items():
            path = name.rpartition(".")[0]
            if follow.into:  # of weights alone
                for each in {each for _, each in tensor_register.modules_sharing_weight(module, path)}:
                    each.register_forward_pre_hook(self._hook(follow.into, follow.repeat))
        return module

    def marks(self, groups: tuple[str, ...], repeat: int) -> np.ndarray:
        """Marks along a layer's inputs, float32: 1 for outputs of units in use, 0 for dropped ones."""
        parts = []
        for name in groups:
            full = self._plan.widths.get(name)
            held = self._plan.pinned[name] if full is None else width.count(full, self._most)
            used = held if full is None else width.count(full, self.width)
            parts.append(np.arange(held) < used)
        return np.repeat(np.concatenate(parts), repeat).astype(np.float32)

    def _aside(self, momentum: float | None) -> Any:
        """Keep the running statistics out of steps at smaller widths: they are those of p_max.

        The few steps that remain count more, so that a round's end weighs as much in them as if all counted.
        """
        fresh = momentum if momentum is None else 1 - (1 - momentum) ** len(self._widths)

        def hook(layer: Any, inputs: tuple[Any, ...]) -> None:
            layer.momentum = fresh if self.width == self._most else 0.0

        return hook

    def _hook(self, groups: tuple[str, ...], repeat: int) -> Any:
        def hook(layer: Any, inputs: tuple[Any, ...]) -> Any:
            if self.width == self._most or not layer.training:
                return None
            heard = inputs[0]
            mark = heard.new_tensor(self.marks(groups, repeat))
            if layer.weight.ndim > 2:
                mark = mark.reshape(-1, *(1,) * (layer.weight.ndim - 2))
            return (heard * mark, *inputs[1:])

        return hook


def send(state: _by_width.State, device: DeviceView) -> Order:
    """Order training at the device's largest width, with the dependencies between units."""
    order = heterofl.send(state, device)
    return replace(order, bundles={**order.bundles, "plan": {"json": masks.to_array(state.plan)}})


def work(task: Task, site: Site) -> Answer:
    """Train with a new width drawn for every mini-batch, or gather statistics where the task asks for them."""
    if "asked" in task.params:
        return _by_width.measured(task, site)
    most, hooks = task.params["rate"], heterofl.hooks_of(task, site, scaled=False)
    widths = tuple(rate for rate in sorted(set(task.params["rates"])) if rate <= most)
    if len(widths) > 1:
        plan = masks.from_array(site.load("plan")["json"])
        ordered = Ordered(plan, most, widths, tensors.rng(task.seed, "widths"))
        narrow = hooks.prepare or (lambda module: module)
        hooks = Hooks(prepare=lambda module: ordered.insert_gates(narrow(module)), steps=(Step(begin=ordered.begin),))
    return fedavg.work(task, site, hooks)


def check(task: Task, site: Site) -> EvaluationSums:
    """Evaluate the part of width p_max on the device's held-out share."""
    hooks = heterofl.hooks_of(task, site, scaled=False)
    return site.engine.evaluate(task.params["network"], site.load("model"), site.held, hooks=hooks)


METHOD = replace(
    heterofl.METHOD,
    paper="arXiv 2102.13451",
    params=Params,
    init=heterofl.by_width,
    send=send,
    work=work,
    check=check,
    settle=_by_width.statistics_rounds(heterofl.parts_of, heterofl.rate_of, scaled=False),
)
