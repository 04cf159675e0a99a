"""Small networks for edge devices, and the residual networks of CIFAR-10. Requires torch."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


def mlp(inputs: int, classes: int, hidden: tuple[int, ...] = (64,)) -> nn.Module:
    widths = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def rezero(inputs: int, classes: int, width: int = 32, blocks: int = 2) -> nn.Module:
    """Build fully connected residual blocks, each with a learned gain (ReZero, arXiv 2003.04887)."""
    stem = [nn.Flatten(), nn.Linear(inputs, width), nn.ReLU()]
    return nn.Sequential(*stem, *(ScaledResidual(width) for _ in range(blocks)), nn.Linear(width, classes))


def cnn(channels: int, size: int, classes: int, width: int = 16) -> nn.Module:
    """Build a CNN in the shape of McMahan et al.'s MNIST network."""
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
    """Build a smooth network with sigmoids, for gradient inversion attacks (arXiv 1906.08935)."""
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
    """Build four 3x3 convolutions with batch norm, and a linear layer on the mean over positions."""
    return nn.Sequential(
        _conv_layer(channels, width, pool=True),
        _conv_layer(width, 2 * width),
        _conv_layer(2 * width, 2 * width, pool=True),
        _conv_layer(2 * width, 4 * width),
        *_pooled_head(4 * width, classes),
    )


def residual(channels: int, classes: int, width: int = 16) -> nn.Module:
    """Build a stem and three residual blocks with projected shortcuts (He et al. 2015, option B)."""
    return nn.Sequential(
        _conv_layer(channels, width, pool=True),
        Residual(width, width, 1, project=True),
        Residual(width, 2 * width, 2, project=True),
        Residual(2 * width, 4 * width, 1, project=True),
        *_pooled_head(4 * width, classes),
    )


def separable(channels: int, classes: int, width: int = 16) -> nn.Module:
    """Build a strided stem and four depthwise-separable convolutions (Howard et al. 2017)."""
    return nn.Sequential(
        _conv_layer(channels, width, stride=2),
        _separable_block(width, 2 * width, 1),
        _separable_block(2 * width, 3 * width, 2),
        _separable_block(3 * width, 4 * width, 1),
        _separable_block(4 * width, 6 * width, 1),
        *_pooled_head(6 * width, classes),
    )


class CifarResNet(nn.Module):  # type: ignore[misc]
    """ResNet-20/32/44/56 for 32x32 images (He et al. 2015, section 4.2), option A shortcuts.

    Tensor names are those of the public checkpoints (`conv1`, `bn1`, `layer1.0.conv1`, ..., `linear`).
    """

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _residual_stage(16, 16, blocks, 1)
        self.layer2 = _residual_stage(16, 32, blocks, 2)
        self.layer3 = _residual_stage(32, 64, blocks, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(torch.flatten(self.pool(x), 1))


class Residual(nn.Module):  # type: ignore[misc]
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
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ScaledResidual(nn.Module):  # type: ignore[misc]
    """Residual block x + gain * f(x) with two linear layers as f and a learned gain, first 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(width, width)
        self.linear2 = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.linear2(F.relu(self.linear1(x)))


class PadShortcut(nn.Module):  # type: ignore[misc]
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.side = (after - before) // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thin = x[:, :, :: self.stride, :: self.stride]
        return F.pad(thin, (0, 0, 0, 0, self.side, self.side))


class ProductPool(nn.Module):  # type: ignore[misc]
    """Adaptive average pooling as two matrix products, because ONNX lacks uneven pooling."""

    def __init__(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("rows", _averaging_matrix(before[0], after[0]))
        self.register_buffer("columns", _averaging_matrix(before[1], after[1]).T.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(torch.matmul(self.rows, x), self.columns)


def _averaging_matrix(before: int, after: int) -> torch.Tensor:
    # Row i averages the entries floor(i b/a) to ceil((i + 1) b/a), as in torch.
    matrix = torch.zeros(after, before)
    for row in range(after):
        first, last = row * before // after, -(-(row + 1) * before // after)
        matrix[row, first:last] = 1.0 / (last - first)
    return matrix


def _residual_stage(before: int, after: int, blocks: int, stride: int) -> nn.Module:
    first = Residual(before, after, stride)
    return nn.Sequential(first, *(Residual(after, after, 1) for _ in range(blocks - 1)))


def _conv_layer(before: int, after: int, stride: int = 1, pool: bool = False) -> nn.Module:
    layers = [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


def _separable_block(before: int, after: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, before, 3, stride, padding=1, groups=before, bias=False),
        nn.BatchNorm2d(before),
        nn.ReLU(),
        nn.Conv2d(before, after, 1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


def _pooled_head(width: int, classes: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)
