"""Order in which a network calls its modules, traced by running it. Imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def trace(model: nn.Module, shape: tuple[int, ...]) -> list[str]:
    """Paths of the modules that one example of `shape` (without batch) goes through, each at its first call.

    In evaluation mode: what only training uses, such as an auxiliary classifier, is not among them. The network
    itself, with path "", is the first.
    """
    called: dict[str, None] = {}

    def hook(path: str) -> Any:
        return lambda module, inputs: called.setdefault(path)

    watches = [each.register_forward_pre_hook(hook(path)) for path, each in model.named_modules()]
    was_training = model.training
    place = next((value.device for value in model.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape, device=place))
    finally:
        model.train(was_training)
        for watch in watches:
            watch.remove()
    return list(called)
