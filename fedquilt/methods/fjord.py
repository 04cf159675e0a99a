"""FjORD: each mini-batch trains a sub-network of random width, up to the device's p_max.

Paper: Horvath et al., FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout,
NeurIPS 2021 (arXiv 2102.13451), Algorithm 1. A device with the largest width p_max draws p for every step uniformly
from the widths up to p_max, and drops all units but the leading ceil(p * C) of each layer. An entry of the new global
model is the mean over the devices that have the entry.

Before an evaluation and at the end, the batch norm statistics of each width are gathered from all devices (`heterofl`).

Deviations: the distillation from p_max to p (section 3.3) is left out. Batch normalisation has one scale for all widths
and statistics by width, as in the paper. The running statistics are those of the steps at p_max, with a larger momentum
because these steps are few, on the devices with that p_max (`heterofl`). A step at a smaller width still computes the
network of p_max, so that bytes and memory are those of p_max. p_max follows the device's memory tier, and is the
smallest for a device that has not reported its memory. The mean is weighted by examples. Momentum and weight decay also
move dropped units. With all widths 1 the method is FedAvg, except for these statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import ClientContext, ClientResult, DeviceView, EvaluationSums, Hooks, Step, Task, TaskSpec
from fedquilt.methods import _subnetworks, fedavg, heterofl
from fedquilt.models.partial import masks, width
from fedquilt.models.partial.masks import MaskPlan


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and the widths by memory tier."""

    rates: heterofl.Rates = (0.2, 0.4, 0.6, 0.8, 1.0)  # P; p_max of devices under 1 GB, from 1, 2, 4 and 8 GB


class OrderedDropoutHooks:
    """Hooks for ordered dropout, with a random width for each mini-batch.

    Args:
        plan: Dependencies between the network's units.
        max_width: Width of the network that is trained, p_max.
        widths: Widths to draw from, up to p_max.
        rng: Generator of the widths.
    """

    def __init__(self, plan: MaskPlan, max_width: float, widths: tuple[float, ...], rng: np.random.Generator) -> None:
        self._plan, self._max_width, self._widths, self._rng = plan, max_width, widths, rng
        self.width = max_width  # of the current step

    def draw_width(self, module: Any) -> None:
        """Draw the width p of the next step, and store it as `width`."""
        self.width = self._widths[int(self._rng.integers(len(self._widths)))]

    def insert_gates(self, module: Any) -> Any:
        """Return the module with hooks that set dropped units to 0 before each layer."""
        from torch.nn.modules.batchnorm import _BatchNorm

        from fedquilt.models.networks import traces

        submodules = dict(module.named_modules())
        for layer in submodules.values():
            if isinstance(layer, _BatchNorm):
                layer.register_forward_pre_hook(self._make_statistics_hook(layer.momentum))
        for name, dependency in self._plan.follows.items():
            path = name.rpartition(".")[0]
            if dependency.into:  # of weights alone
                for layer in {layer for _, layer in traces.modules_sharing_weight(module, path)}:
                    layer.register_forward_pre_hook(self._make_input_mask_pre_hook(dependency.into, dependency.repeat))
        return module

    def unit_mask(self, groups: tuple[str, ...], repeat: int) -> np.ndarray:
        """Return a layer's float32 input mask, (inputs,), with 1 for the `repeat` inputs of each used unit."""
        parts = []
        for name in groups:
            full_count = self._plan.widths.get(name)
            unit_count = (
                self._plan.pinned[name] if full_count is None else width.unit_count(full_count, self._max_width)
            )
            used_count = unit_count if full_count is None else width.unit_count(full_count, self.width)
            parts.append(np.arange(unit_count) < used_count)
        return np.repeat(np.concatenate(parts), repeat).astype(np.float32)

    def _make_statistics_hook(self, momentum: float | None) -> Any:
        # Only steps at p_max change running statistics. A larger momentum compensates for the skipped steps.
        adjusted_momentum = momentum if momentum is None else 1 - (1 - momentum) ** len(self._widths)

        def hook(layer: Any, inputs: tuple[Any, ...]) -> None:
            layer.momentum = adjusted_momentum if self.width == self._max_width else 0.0

        return hook

    def _make_input_mask_pre_hook(self, groups: tuple[str, ...], repeat: int) -> Any:
        def hook(layer: Any, inputs: tuple[Any, ...]) -> Any:
            if self.width == self._max_width or not layer.training:
                return None
            layer_input = inputs[0]
            mask = layer_input.new_tensor(self.unit_mask(groups, repeat))
            if layer.weight.ndim > 2:
                mask = mask.reshape(-1, *(1,) * (layer.weight.ndim - 2))
            return (layer_input * mask, *inputs[1:])

        return hook


def send(state: _subnetworks.State, device: DeviceView) -> TaskSpec:
    """Return the task spec to train at the device's p_max, with the dependencies between units."""
    task_spec = heterofl.send(state, device)
    return replace(task_spec, bundles={**task_spec.bundles, "plan": {"json": masks.plan_to_array(state.plan)}})


def work(task: Task, site: ClientContext) -> ClientResult:
    """Train with a random width per mini-batch, or gather statistics if the task requests them."""
    if "asked" in task.params:
        return _subnetworks.gather_statistics(task, site)
    max_width, hooks = task.params["rate"], heterofl.make_width_hooks(task, site, scaled=False)
    widths = tuple(rate for rate in sorted(set(task.params["rates"])) if rate <= max_width)
    if len(widths) > 1:
        plan = masks.plan_from_array(site.load("plan")["json"])
        dropout = OrderedDropoutHooks(plan, max_width, widths, tensors.seeded_rng(task.seed, "widths"))
        shrink = hooks.prepare or (lambda module: module)
        hooks = Hooks(
            prepare=lambda module: dropout.insert_gates(shrink(module)), steps=(Step(before_step=dropout.draw_width),)
        )
    return fedavg.work(task, site, hooks)


def check(task: Task, site: ClientContext) -> EvaluationSums:
    """Evaluate the sub-network of width p_max on the held-out examples."""
    hooks = heterofl.make_width_hooks(task, site, scaled=False)
    return site.engine.evaluate(task.params["network"], site.load("model"), site.held_out, hooks=hooks)


METHOD = replace(
    heterofl.METHOD,
    traits=replace(heterofl.METHOD.traits, sent_data="the sub-network of its memory tier"),
    paper="arXiv 2102.13451",
    params=Params,
    init=heterofl.initial_width_state,
    send=send,
    work=work,
    check=check,
    evaluation_round=_subnetworks.make_statistics_round(heterofl.places_by_rate, heterofl.device_rate, scaled=False),
)
