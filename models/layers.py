"""Which tensors make a layer, told from their names and shapes alone: numpy, no network at hand.

A layer is what has weights of two dimensions or more, with its bias and the scale and shift of the
normalisation that follows it. Counters and running statistics belong to none: they describe a device's data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fedquilt.core import Tensors

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def layers(model: Tensors) -> dict[str, tuple[str, ...]]:
    """Layer -> its tensors, sorted; layers in the natural order of their names ("2" before "10").

    A normalisation belongs to the convolution beside it that gives as many channels and has its number
    ("bn1" to "conv1"), or in a sequence the one before it ("1" to "0"); one without is a layer of its own.
    """
    modules: dict[str, list[str]] = {}
    for name in model:
        if name.rpartition(".")[2] not in STATISTICS and model[name].dtype.kind == "f":
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    wide = {module: names for module, names in modules.items() if any(model[name].ndim > 1 for name in names)}
    found = {module: list(names) for module, names in wide.items()}
    for module, names in modules.items():
        if module not in wide:
            channels = max(model[name].size for name in names)
            fit = [each for each in wide if _channels(model, wide[each]) == channels]
            found.setdefault(_beside(module, fit) or module, []).extend(names)
    return {module: tuple(sorted(found[module])) for module in sorted(found, key=natural)}


def head(model: Tensors) -> str | None:
    """The layer that tells the classes: the last by name of those whose weights are matrices; None: there is none."""
    told = layers(model)
    flat = [layer for layer, names in told.items() if max(model[name].ndim for name in names) == 2]
    return flat[-1] if flat else None


def natural(name: str) -> list[tuple[int, int | str]]:
    """A key that sorts numbers in names as numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def _channels(model: Tensors, names: Iterable[str]) -> int:
    return max(int(model[name].shape[0]) for name in names if model[name].ndim > 1)


def _beside(module: str, others: Iterable[str]) -> str | None:
    """Of its neighbours the one with its number, or the one before it in a sequence."""
    parent, _, leaf = module.rpartition(".")
    near = {each.rpartition(".")[2]: each for each in others if each.rpartition(".")[0] == parent}
    if leaf.isdigit():
        before = [int(each) for each in near if each.isdigit() and int(each) < int(leaf)]
        return near[str(max(before))] if before and int(leaf) - max(before) == 1 else None
    number = re.search(r"\d+$", leaf)
    same = [each for each in near if number and re.search(r"\D" + number.group() + "$", each)]
    return near[same[0]] if len(same) == 1 else None
