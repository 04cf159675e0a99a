"""Networks that are difficult for methods: no name or shape shows the role of a tensor.

This module imports torch.

A network's name is `difficult_networks:<function>`. All take (inputs, classes); tokens and maps are made of the inputs,
so that the same examples serve all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

WIDTH: Final = 8


def root_parameter(inputs: int, classes: int, drop: float = 0.5, root: bool = True) -> nn.Module:
    """Return a network with dropout and batch norm, and with `root` a parameter of the root module."""
    return _RootParameterNetwork(inputs, classes, drop, root)


def tied(inputs: int, classes: int) -> nn.Module:
    """Return a network of two layers with one weight, a scalar gain, batch norm and a counter buffer."""
    return _TiedNetwork(inputs, classes)


def shared(inputs: int, classes: int) -> nn.Module:
    """Return a network that has one module, with batch norm, in two places."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, WIDTH), block, block, nn.Linear(WIDTH, classes))


def moving_average(inputs: int, classes: int) -> nn.Module:
    """Return a network that normalises by moving averages, in float buffers with unusual names."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, WIDTH), MovingNorm(), nn.ReLU(), nn.Linear(WIDTH, classes))


def tokens(inputs: int, classes: int, drop: float = 0.1) -> nn.Module:
    """Return a network of attention over its inputs, with a class token and positions at the root."""
    return _TokenNetwork(inputs, classes, drop)


def maps(inputs: int, classes: int) -> nn.Module:
    """Return a network of convolutions with batch norm over a sequence, and a mean over its axis."""
    return _MapNetwork(inputs, classes)


def typed_buffers(inputs: int, classes: int) -> nn.Module:
    """Return a network with int and float16 buffers, two of which change in training."""
    return _TypedNetwork(inputs, classes)


def weight_normalisation(inputs: int, classes: int) -> nn.Module:
    """Return a network with a LayerNorm at two depths, weight norm, and batch norm without weights."""
    return _WeightNormalisedNetwork(inputs, classes)


NETWORKS: Final[dict[str, Callable[..., nn.Module]]] = {
    each.__name__: each
    for each in (root_parameter, tied, shared, moving_average, tokens, maps, typed_buffers, weight_normalisation)
}


def network_table(name: str, inputs: int = 6, classes: int = 3, **more: Any) -> dict[str, Any]:
    """Return the [model] table of one of these networks."""
    return {"name": f"{__name__}:{name}", "inputs": inputs, "classes": classes, **more}


# -- modules --------------------------------------------------------------------------------------


class _RootParameterNetwork(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, classes: int, drop: float, root: bool) -> None:
        super().__init__()
        if root:
            self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.first, self.norm, self.drop = nn.Linear(inputs, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(drop)
        self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x.flatten(1)))
        x = x + self.shift if hasattr(self, "shift") else x
        return self.head(torch.relu(self.second(self.drop(torch.relu(x)))))


class _TiedNetwork(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.first, self.norm = nn.Linear(inputs, WIDTH), nn.BatchNorm1d(WIDTH)
        self.second, self.third = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.third.weight = self.second.weight
        self.register_buffer("seen", torch.tensor(3))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        x = torch.relu(self.norm(self.first(x.flatten(1))))
        x = x + self.gain * torch.relu(self.second(x))
        return self.head(torch.relu(self.third(x)))


class MovingNorm(nn.Module):  # type: ignore[misc]
    """Normalisation by the batch in training, else by moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean_ema", torch.zeros(WIDTH))
        self.register_buffer("var_ema", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values (n, width) normalised to mean 0 and variance 1."""
        mean, var = self.mean_ema, self.var_ema
        if self.training:
            mean, var = x.mean(0), x.var(0, unbiased=False)
            with torch.no_grad():
                self.mean_ema.lerp_(mean, 0.5)
                self.var_ema.lerp_(var, 0.5)
        return (x - mean) / torch.sqrt(var + 1e-2)


class _TokenNetwork(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, classes: int, drop: float) -> None:
        super().__init__()
        self.class_token, self.pos_embedding = (
            nn.Parameter(torch.zeros(1, 1, WIDTH)),
            nn.Parameter(torch.full((1, inputs + 1, WIDTH), 0.02)),
        )
        places = torch.arange((inputs + 1) * WIDTH).float().reshape(1, inputs + 1, WIDTH)
        self.register_buffer("waves", 0.1 * torch.sin(places))
        self.embed = nn.Linear(1, WIDTH)
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, dropout=drop, batch_first=True)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.flatten(1)[:, :, None])
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.pos_embedding + self.waves
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head((x + self.outer(F.gelu(self.inner(x))))[:, 0])


class _MapNetwork(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv1d(1, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)
        self.second, self.norm2 = nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1, bias=False), nn.BatchNorm1d(2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.first(x.flatten(1)[:, None])))
        return self.head(torch.relu(self.norm2(self.second(x).mean(2))))


class _TypedNetwork(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, classes)
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float16))
        self.register_buffer("level", torch.ones(WIDTH, dtype=torch.float16))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x.flatten(1)))[:, self.order] * self.scale.float()
        if self.training:
            with torch.no_grad():
                self.seen += 1
                self.level.lerp_(x.mean(0).half(), 0.5)
        return self.head(x + 0.1 * self.level.float())


class _WeightNormalisedNetwork(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(inputs, WIDTH), nn.BatchNorm1d(WIDTH, affine=False)
        self.scale, self.second = nn.LayerNorm(WIDTH), nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.scale(self.norm(self.first(x.flatten(1)))))
        return self.head(torch.relu(self.second(self.scale(x))))
