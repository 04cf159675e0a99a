"""Networks for time series, spectrograms and text. Imports torch.

Time series and spectrograms come as (n, steps, channels): a row of numbers for each step, as a table of readings has
them. Text comes as (n, length) numbers of tokens, of which 0 is padding (`fedquilt.data.tokens`).
"""

from __future__ import annotations

import torch
from torch import nn

from fedquilt.models.networks.vit import TransformerBlock


class Conv1d(nn.Module):  # type: ignore[misc]
    """Three convolutions along time with pooling, a mean over time, and a linear layer."""

    def __init__(self, channels: int, steps: int, classes: int, width: int, kernel: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for after in (width, 2 * width, 2 * width):
            layers += [nn.Conv1d(before, after, kernel, padding=kernel // 2), nn.ReLU()]
            if steps >= 4:
                layers.append(nn.MaxPool1d(2))
                steps //= 2
            before = after
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x.transpose(1, 2)).mean(dim=2))


def conv1d(channels: int, steps: int, classes: int, width: int = 16, kernel: int = 5) -> nn.Module:
    if kernel % 2 == 0:
        raise ValueError(f"kernel {kernel} is even: give an odd one")
    return Conv1d(channels, steps, classes, width, kernel)


class Gru(nn.Module):  # type: ignore[misc]
    """Gated recurrent network (arXiv 1406.1078) with a linear layer on the last state."""

    def __init__(self, channels: int, classes: int, width: int, layers: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(channels, width, layers, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(x)  # (n, steps, width)
        return self.head(states[:, -1])


def gru(channels: int, steps: int, classes: int, width: int = 32, layers: int = 1) -> nn.Module:
    if steps < 1:
        raise ValueError(f"steps {steps}: 1 or more are wanted")
    return Gru(channels, classes, width, layers)


class Transformer(nn.Module):  # type: ignore[misc]
    """Transformer encoder with learned positions, a mean over non-padding tokens, and a linear layer."""

    def __init__(self, vocabulary: int, length: int, classes: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(1, length, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, 2 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.long()  # engines hand over float32
        said = (tokens != 0).to(self.place.dtype).unsqueeze(2)  # (n, length, 1)
        values = (self.embed(tokens) + self.place) * said
        found = self.norm(self.blocks(values)) * said
        return self.head(found.sum(dim=1) / said.sum(dim=1).clamp(min=1.0))


def transformer(
    vocabulary: int, length: int, classes: int, width: int = 32, depth: int = 2, heads: int = 2
) -> nn.Module:
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}")
    return Transformer(vocabulary, length, classes, width, depth, heads)
