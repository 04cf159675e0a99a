"""Small networks for boards, and the residual nets of CIFAR-10. Imports torch."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


def mlp(inputs: int, classes: int, hidden: tuple[int, ...] = (64,)) -> nn.Module:
    """Fully connected, ReLU between; `inputs` is the number of values of one example."""
    widths = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def rezero(inputs: int, classes: int, width: int = 32, blocks: int = 2) -> nn.Module:
    """Fully connected residual blocks, each behind one learnt gain without axes (ReZero, arXiv 2003.04887)."""
    stem = [nn.Flatten(), nn.Linear(inputs, width), nn.ReLU()]
    return nn.Sequential(*stem, *(Gained(width) for _ in range(blocks)), nn.Linear(width, classes))


def cnn(channels: int, size: int, classes: int, width: int = 16) -> nn.Module:
    """Two 5x5 convolutions with 2x2 pooling, one hidden layer: the shape of McMahan et al.'s MNIST network."""
    small = size // 4
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * small * small, 8 * width),
        nn.ReLU(),
        nn.Linear(8 * width, classes),
    )


def lenet(channels: int, size: int, classes: int, width: int = 12) -> nn.Module:
    """Three 5x5 convolutions with sigmoids, and linear: smooth, as gradient attacks need it (arXiv 1906.08935)."""
    small = (size + 3) // 4
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(width, width, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(width, width, 5, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(width * small * small, classes),
    )


def plain(channels: int, classes: int, width: int = 16) -> nn.Module:
    """Four 3x3 convolutions, max pooling, average pool, linear."""
    return nn.Sequential(
        _conv(channels, width, pool=True),
        _conv(width, 2 * width),
        _conv(2 * width, 2 * width, pool=True),
        _conv(2 * width, 4 * width),
        *_head(4 * width, classes),
    )


def residual(channels: int, classes: int, width: int = 16) -> nn.Module:
    """A stem and three residual blocks, projected shortcuts (He et al. 2015, option B)."""
    return nn.Sequential(
        _conv(channels, width, pool=True),
        Residual(width, width, 1, project=True),
        Residual(width, 2 * width, 2, project=True),
        Residual(2 * width, 4 * width, 1, project=True),
        *_head(4 * width, classes),
    )


def separable(channels: int, classes: int, width: int = 16) -> nn.Module:
    """A strided stem and four depthwise-separable convolutions (Howard et al. 2017)."""
    return nn.Sequential(
        _conv(channels, width, stride=2),
        _separable(width, 2 * width, 1),
        _separable(2 * width, 3 * width, 2),
        _separable(3 * width, 4 * width, 1),
        _separable(4 * width, 6 * width, 1),
        *_head(6 * width, classes),
    )


class CifarResNet(nn.Module):  # type: ignore[misc]
    """ResNet-20/32/44/56 for 32x32 images (He et al. 2015, section 4.2), shortcuts without weights (option A).

    Tensor names are those of the public checkpoints (`conv1`, `bn1`, `layer1.0.conv1`, ..., `linear`).
    """

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, 1)
        self.layer2 = _stage(16, 32, blocks, 2)
        self.layer3 = _stage(32, 64, blocks, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (n, classes) of images (n, 3, 32, 32)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(torch.flatten(self.pool(x), 1))


class Residual(nn.Module):  # type: ignore[misc]
    """Two 3x3 convolutions around a shortcut; where widths differ it is a 1x1 convolution, or a pad with zeros."""

    def __init__(self, before: int, after: int, stride: int, *, project: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Sequential()
        if before != after or stride != 1:
            self.shortcut = (
                nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
                if project
                else PadShortcut(before, after, stride)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (n, after, h / stride, w / stride) of maps (n, before, h, w)."""
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class Gained(nn.Module):  # type: ignore[misc]
    """x + gain * f(x) with two linear layers as f; the gain is a tensor of shape (), 0 at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(width, width)
        self.linear2 = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Values (n, width) of values (n, width)."""
        return x + self.gain * self.linear2(F.relu(self.linear1(x)))


class PadShortcut(nn.Module):  # type: ignore[misc]
    """Every `stride`-th pixel, and channels of zeros on both sides."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.side = (after - before) // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (n, after, h / stride, w / stride) of maps (n, before, h, w)."""
        thin = x[:, :, :: self.stride, :: self.stride]
        return F.pad(thin, (0, 0, 0, 0, self.side, self.side))


class ProductPool(nn.Module):  # type: ignore[misc]
    """Adaptive average pooling as two matrix products, for sizes that do not divide: ONNX has no such operation."""

    def __init__(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("rows", _averages(before[0], after[0]))
        self.register_buffer("columns", _averages(before[1], after[1]).T.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Means (n, c, *after) of maps (n, c, *before)."""
        return torch.matmul(torch.matmul(self.rows, x), self.columns)


def _averages(before: int, after: int) -> torch.Tensor:
    """(after, before): row i averages the entries floor(i b/a) to ceil((i + 1) b/a), as torch does."""
    matrix = torch.zeros(after, before)
    for row in range(after):
        first, last = row * before // after, -(-(row + 1) * before // after)
        matrix[row, first:last] = 1.0 / (last - first)
    return matrix


def _stage(before: int, after: int, blocks: int, stride: int) -> nn.Module:
    first = Residual(before, after, stride)
    return nn.Sequential(first, *(Residual(after, after, 1) for _ in range(blocks - 1)))


def _conv(before: int, after: int, stride: int = 1, pool: bool = False) -> nn.Module:
    layers = [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


def _separable(before: int, after: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, before, 3, stride, padding=1, groups=before, bias=False),
        nn.BatchNorm2d(before),
        nn.ReLU(),
        nn.Conv2d(before, after, 1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


def _head(width: int, classes: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)
