"""Networks cut to their first stages, and classifiers at the inputs of stages.

torch is imported when a function here is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedquilt.core import ModelError, Tensors


@dataclass(frozen=True)
class Stage:
    entrance: str  # first layer, whose input is the stage's only input
    width: int  # channels of that input
    names: tuple[str, ...]  # its tensors, running statistics too


def keep_first_stages(
    module: Any, start: Tensors, looks: Sequence[Stage], answer: Callable[[list[Any], Any], Any], *, whole: bool
) -> Any:
    """Cut a module to its first stages, in place. `answer` computes scores from stage inputs.

    Args:
        module: Whole network.
        start: Tensors that remain.
        looks: Stages whose inputs are recorded, in order. Unless `whole`, the forward pass ends at the last of these
        inputs.
        answer: Function from the pooled inputs, (n, width) each, and the network's scores, None unless `whole`, to
        scores.
        whole: Whether to keep the stages after the last of `looks`.

    Raises:
        ModelError: If the order of the network's layers does not follow from their names.
    """
    from torch import nn

    called: set[str] = set()
    held = {id(value) for name, value in module.state_dict(keep_vars=True).items() if name in start}
    heard: dict[int, Any] = {}
    inner = dict(module.named_modules())
    kept = {path for path, each in inner.items() if any(id(value) in held for value in _own_tensors(each))}
    for index, stage in enumerate(looks):
        last = index == len(looks) - 1 and not whole
        inner[stage.entrance].register_forward_pre_hook(_StageHook(heard, index, stage, last))
    for path, each in inner.items():
        if not path or not _own_tensors(each):
            continue
        if path in kept:
            each.register_forward_pre_hook(lambda layer, inputs, path=path: called.add(path))
        elif not any(each.children()) and not any(path == stage.entrance for stage in looks):
            _replace_with_identity(module, path)
        else:  # only an input is read, of the layer or of one in it, and it is never run to its end
            for leaf in [*dict(each.named_parameters(recurse=False)), *dict(each.named_buffers(recurse=False))]:
                setattr(each, leaf, None)
    within = {path: inner[path.rpartition(".")[0]] for path in kept if path}
    used = {
        path for path, each in within.items() if not isinstance(each, nn.MultiheadAttention)
    }  # reads, calls nothing
    plain = _capture_original_forward(module)

    def forward(x: Any) -> Any:
        heard.clear()
        called.clear()
        scores = None
        with contextlib.suppress(_StageReached):
            scores = plain(x)
        told = [heard[index] for index in range(len(looks)) if index in heard]
        result = answer(told, scores) if len(told) == len(looks) else None
        if result is None or called < used:
            late = ", ".join(sorted(used - called)[:3]) or "a stage"
            raise ModelError(f"the names of this network's layers do not tell their order ({late}): take another one")
        return result

    module.forward = forward
    return module


def add_exits(module: Any, looks: Sequence[Stage], classes: int) -> Any:
    """Add a linear layer `exit.<i>` for the input of each stage, in place, and return the module."""
    from torch import nn

    module.add_module("exit", nn.ModuleList(nn.Linear(each.width, classes) for each in looks))
    return module


def build_exits_network(module: Any, looks: Sequence[Sequence[Any]], classes: int) -> Any:
    """Return the network with an exit at each stage. Scores are the mean over all classifiers.

    Args:
        module: Network without exits.
        looks: First layer of each stage and the channels of its input.
        classes: Outputs of each classifier.
    """
    import torch

    found = [Stage(str(entrance), int(width), ()) for entrance, width in looks]

    def mean_scores(told: list[Any], scores: Any) -> Any:
        return torch.stack([*(linear(x) for linear, x in zip(module.exit, told, strict=True)), scores]).mean(dim=0)

    return add_exits(keep_first_stages(module, module.state_dict(), found, mean_scores, whole=True), found, classes)


def _own_tensors(module: Any) -> list[Any]:
    """Return the module's parameters and buffers, without those of inner modules."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _capture_original_forward(module: Any) -> Callable[[Any], Any]:
    # A Sequential would also run modules that are added later, so copy its modules.
    from torch import nn

    return nn.Sequential(*module) if type(module) is nn.Sequential else module.forward


class _StageReached(Exception):
    """Ends a forward pass early."""


class _StageHook:
    """A hook before a stage's first layer."""

    def __init__(self, heard: dict[int, Any], index: int, stage: Stage, last: bool) -> None:
        self._heard, self._index, self._stage, self._last = heard, index, stage, last

    def __call__(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        pooled = _average_over_positions(layer, x)
        if pooled.shape[1] != self._stage.width:
            raise ModelError(
                f"layer {self._stage.entrance!r} hears {pooled.shape[1]} channels, {self._stage.width} were expected"
            )
        self._heard[self._index] = pooled
        if self._last:
            raise _StageReached


def _average_over_positions(layer: Any, x: Any) -> Any:
    from torch import nn

    # exactly these: torchvision's LayerNorm2d, a kind of LayerNorm, has its channels first
    last = type(layer) in (nn.Linear, nn.LayerNorm, nn.MultiheadAttention)
    among = range(1, x.ndim - 1) if last else range(2, x.ndim)
    return x.mean(dim=tuple(among)) if among else x


def _replace_with_identity(module: Any, path: str) -> None:
    from torch import nn

    parent, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(parent), leaf, nn.Identity())
