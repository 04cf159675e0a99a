"""Costs of a network's layers, traced with one example. Requires torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedquilt.costs.cost_model import Layer


def trace_layer_costs(model: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """Return the cost of each layer for one example of `shape`, in the order of first use.

    In evaluation mode, as `calls.trace`, but with gradients: without them torch runs a transformer's layers by kernels
    of their own, which training does not use.
    """
    counter = _OperationCounter(model)
    was_training = model.training
    place = next((value.device for value in model.parameters()), torch.device("cpu"))
    try:
        x = torch.zeros(1, *shape, device=place)
        with torch.enable_grad(), counter:
            model.eval()(x)
    finally:
        model.train(was_training)
        counter.remove_hooks()
    return [Layer(path, *numbers) for path, numbers in counter.found.items()]


class _OperationCounter(TorchDispatchMode):  # type: ignore[misc]
    """Sums over operations, by the innermost module that runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
        self._running = [""]
        self.found: dict[str, list[Any]] = {}
        self._watches = []
        for path, each in model.named_modules():
            self._watches.append(each.register_forward_pre_hook(lambda _, given, path=path: self._running.append(path)))
            self._watches.append(each.register_forward_hook(lambda _, given, made: self._leave_module()))

    def remove_hooks(self) -> None:
        for watch in self._watches:
            watch.remove()

    def _leave_module(self) -> None:
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view:
            return made
        row = self.found.setdefault(self._running[-1], [0.0, 0.0, 0.0, 0])
        given = [value for value in _tensors_in((args, kwargs)) if value.untyped_storage().data_ptr() not in self._own]
        weighted = len(given) < len(_tensors_in((args, kwargs)))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            row[0 if weighted else 1] += float(count(*args, **(kwargs or {}), out_val=made))
        row[2] += float(sum(value.nbytes for value in (*given, *_tensors_in(made))))
        row[3] += 1
        return made


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]
