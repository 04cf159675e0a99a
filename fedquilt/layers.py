"""Layers of a network and their order, from its tensors alone: numpy, without the network itself.

A layer is what has weights of two dimensions or more, with its bias and the scale and shift of the
normalisation that follows it. Counters and running statistics belong to no layer: they describe a device's data.
Names do not give the order in which a network uses its layers ("classifier" sorts before "encoder"):
`fedquilt prepare` traces it (`models.networks.calls`) into the network's table. Older bundles have none; then the
natural order of names replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedquilt.core import Tensors

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def calls(network: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules of a network's table in the order of their first call; (): not in its bundle."""
    return tuple(str(path) for path in network.get("calls", ()))


def layers(model: Tensors, calls: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Layer -> its tensors, sorted; layers by their first call, else in the natural order of names ("2" before "10").

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
    return {module: tuple(sorted(found[module])) for module in ordered(found, calls)}


def head(model: Tensors, calls: Sequence[str] = ()) -> str | None:
    """The classifier: last of the layers whose weights are matrices; None: there is none."""
    told = layers(model, calls)
    flat = [layer for layer, names in told.items() if max(model[name].ndim for name in names) == 2]
    return flat[-1] if flat else None


def ordered(names: Iterable[str], calls: Sequence[str] = ()) -> list[str]:
    """Modules or their tensors in order of the modules' first call; without calls, and within one, in natural order.

    A module that is never called, as its parent uses its weights itself, stands with the nearest module around it.
    """
    place = {path: index for index, path in enumerate(calls)}

    def key(name: str) -> tuple[int, list[tuple[int, int | str]]]:
        path = name
        while path and path not in place:
            path = path.rpartition(".")[0]
        return place.get(path, -1), natural(name)

    return sorted(names, key=key)


def natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key that compares numbers in names as numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def _channels(model: Tensors, names: Iterable[str]) -> int:
    return max(int(model[name].shape[0]) for name in names if model[name].ndim > 1)


def _beside(module: str, others: Iterable[str]) -> str | None:
    """The neighbour with the same number, or the one before it in a sequence."""
    parent, _, leaf = module.rpartition(".")
    near = {each.rpartition(".")[2]: each for each in others if each.rpartition(".")[0] == parent}
    if leaf.isdigit():
        before = [int(each) for each in near if each.isdigit() and int(each) < int(leaf)]
        return near[str(max(before))] if before and int(leaf) - max(before) == 1 else None
    number = re.search(r"\d+$", leaf)
    same = [each for each in near if number and re.search(r"\D" + number.group() + "$", each)]
    return near[same[0]] if len(same) == 1 else None
