"""Neuron masks in the forward pass of a torch network.

The inputs of each layer that reads masked neurons are multiplied by the mask: after activation, normalisation, pooling
and flattening, which has the same effect as masking the activation. Weights are never multiplied in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedquilt.core import ForwardPass, ModelError, Step
from fedquilt.models.networks import traces
from fedquilt.models.partial.masks import MaskPlan, TensorGroups

SCORES = "mask_scores"
"""Parameter s (h,) of a prepared network. A neuron is used with probability sigmoid(s)."""


class MaskHooks:
    """Hooks that train mask scores and weights in turn (FedPeWS, Procedures I and II).

    Args:
        plan: Groups of the network's neurons.
        others_mean: Mean theta of the other devices, (h,), or None to leave out the diversity term.
        diversity: Weight of the diversity term, lambda.
        mu: Weight of the proximal term on covered entries.
    """

    def __init__(self, plan: MaskPlan, others_mean: torch.Tensor | None, diversity: float, mu: float) -> None:
        self._plan, self._others_mean, self._diversity, self._mu = plan, others_mean, diversity, mu
        self._draws = torch.zeros(plan.neurons)  # uniform, (h,): neuron l is used where its draw is below theta_l
        self._masks: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}  # values before a step on the scores

    def training_steps(self, rate: float) -> tuple[Step, Step]:
        """Return a step on the mask scores, at `rate` times the learning rate, and a step on the weights."""
        scores = Step(
            rate=lambda name: rate if name == SCORES else 0.0,
            penalty=self._diversity_penalty if self._others_mean is not None and self._diversity else None,
            before_step=lambda module: self._begin_step(module, weights=False),
        )
        weights = Step(
            rate=lambda name: float(name != SCORES),
            penalty=self._proximal_penalty if self._mu else None,
            before_step=lambda module: self._begin_step(module, weights=True),
        )
        return scores, weights

    def prepare(self, module: Any) -> Any:
        """Add mask scores of 0 and the hooks that mask inputs to a network, in place, and return the network."""
        module.register_parameter(SCORES, nn.Parameter(torch.zeros(self._plan.neurons)))
        inner = dict(module.named_modules())
        for name, follow in self._plan.follows.items():
            path = name.rpartition(".")[0]
            if not follow.into:  # no weights
                continue
            if path not in inner:
                raise ModelError(f"the plan of masks belongs to another network, with a layer {path!r}")
            for layer in {layer for _, layer in traces.modules_sharing_weight(module, path)}:
                layer.register_forward_pre_hook(self._make_input_mask_hook(follow))
        module.register_forward_pre_hook(self._sample_mask)
        return module

    def _begin_step(self, module: nn.Module, weights: bool) -> None:
        # Buffers such as running statistics are restored after a step on the scores.
        self._draws = torch.rand(self._plan.neurons)  # on the CPU: the same draws wherever the network is
        buffers = dict(module.named_buffers())
        if not weights:
            self._buffers = {name: value.clone() for name, value in buffers.items()}
            return
        for name, value in self._buffers.items():
            buffers[name].copy_(value)

    def _sample_mask(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        # Straight-through estimator: the gradient reaches theta as if the mask were theta.
        theta = torch.sigmoid(getattr(module, SCORES))
        mask = (self._draws.to(theta.device) < theta).float() + (theta - theta.detach())  # exactly 0, but a gradient
        parts = torch.split(mask, list(self._plan.widths.values()))
        self._masks = dict(zip(self._plan.widths, parts, strict=True))
        self._masks |= {name: mask.new_ones(width) for name, width in self._plan.pinned.items()}

    def _make_input_mask_hook(self, follow: TensorGroups) -> Any:
        def apply_mask(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x = inputs[0]
            mask = self._mask_along(follow.into, follow.repeat)
            if x.ndim > 2 and not isinstance(layer, nn.Linear):
                mask = mask.reshape(-1, *(1,) * (x.ndim - 2))
            return (x * mask.to(x.dtype), *inputs[1:])

        return apply_mask

    def _mask_along(self, names: Sequence[str], repeat: int = 1) -> torch.Tensor:
        masks = [self._masks[name] for name in names]
        mask = masks[0] if len(masks) == 1 else torch.cat(masks)
        return mask if repeat == 1 else mask.repeat_interleave(repeat)

    def _diversity_penalty(self, forward: ForwardPass) -> torch.Tensor:
        """Return -lambda ||theta_i - theta_{g without i}||^2, summed over neurons (FedPeWS, Eq. 6)."""
        assert self._others_mean is not None
        theta = torch.sigmoid(getattr(forward.module, SCORES))
        return -self._diversity * torch.square(theta - self._others_mean.to(theta.device)).sum()

    def _proximal_penalty(self, forward: ForwardPass) -> torch.Tensor:
        """Return the proximal term on covered entries, mu/2 ||(x - x_g) M||^2."""
        parts = []
        for name, value in forward.module.named_parameters():
            if name == SCORES:
                continue
            drift, follow = value - forward.anchors["start"][name], self._plan.follows.get(name)
            if follow and follow.out:
                drift = drift * self._mask_along(follow.out).reshape(-1, *(1,) * (value.ndim - 1))
            if follow and follow.into:
                drift = drift * self._mask_along(follow.into, follow.repeat).reshape(1, -1, *(1,) * (value.ndim - 2))
            parts.append(torch.square(drift).sum())
        return self._mu / 2 * torch.stack(parts).sum()
