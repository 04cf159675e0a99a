"""Small networks for images, series and texts, and the residual networks of CIFAR-10.

The input of networks for time series and spectrograms is (n, steps, channels). The input of networks for text is
(n, length) token ids, where 0 is padding. Requires torch.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from fedquilt.core import ModelError


def mlp(inputs: int, classes: int, hidden: tuple[int, ...] = (64,)) -> nn.Module:
    widths = [inputs, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for in_width, out_width in pairwise(widths):
        layers += [nn.Linear(in_width, out_width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def rezero(inputs: int, classes: int, width: int = 32, blocks: int = 2) -> nn.Module:
    stem = [nn.Flatten(), nn.Linear(inputs, width), nn.ReLU()]
    return nn.Sequential(*stem, *(ScaledResidual(width) for _ in range(blocks)), nn.Linear(width, classes))


def cnn(channels: int, size: int, classes: int, width: int = 16) -> nn.Module:
    """Build a CNN in the shape of McMahan et al.'s MNIST network."""
    pooled_size = size // 4
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * pooled_size * pooled_size, 8 * width),
        nn.ReLU(),
        nn.Linear(8 * width, classes),
    )


def lenet(channels: int, size: int, classes: int, width: int = 12) -> nn.Module:
    """Build a smooth network with sigmoids, for gradient inversion attacks (arXiv 1906.08935)."""
    pooled_size = (size + 3) // 4
    return nn.Sequential(
        nn.Conv2d(channels, width, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(width, width, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(width, width, 5, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(width * pooled_size * pooled_size, classes),
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

    def __init__(self, depth: int, classes: int = 10) -> None:
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
    def __init__(self, in_channels: int, out_channels: int, stride: int, *, project: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Sequential()
        if in_channels != out_channels or stride != 1:
            self.shortcut = (
                nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))
                if project
                else PadShortcut(in_channels, out_channels, stride)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ScaledResidual(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(width, width)
        self.linear2 = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.linear2(F.relu(self.linear1(x)))


class PadShortcut(nn.Module):  # type: ignore[misc]
    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.side = (out_channels - in_channels) // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thin = x[:, :, :: self.stride, :: self.stride]
        return F.pad(thin, (0, 0, 0, 0, self.side, self.side))


class ProductPool(nn.Module):  # type: ignore[misc]
    """Adaptive average pooling as two matrix products, because ONNX lacks uneven pooling."""

    def __init__(self, input_size: tuple[int, ...], output_size: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("rows", _averaging_matrix(input_size[0], output_size[0]))
        self.register_buffer("columns", _averaging_matrix(input_size[1], output_size[1]).T.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(torch.matmul(self.rows, x), self.columns)


def _averaging_matrix(input_size: int, output_size: int) -> torch.Tensor:
    # Row i averages the entries floor(i b/a) to ceil((i + 1) b/a), as in torch.
    matrix = torch.zeros(output_size, input_size)
    for row in range(output_size):
        first, last = row * input_size // output_size, -(-(row + 1) * input_size // output_size)
        matrix[row, first:last] = 1.0 / (last - first)
    return matrix


def _residual_stage(in_channels: int, out_channels: int, blocks: int, stride: int) -> nn.Module:
    first = Residual(in_channels, out_channels, stride)
    return nn.Sequential(first, *(Residual(out_channels, out_channels, 1) for _ in range(blocks - 1)))


def _conv_layer(in_channels: int, out_channels: int, stride: int = 1, pool: bool = False) -> nn.Module:
    layers = [
        nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


def _separable_block(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, in_channels, 3, stride, padding=1, groups=in_channels, bias=False),
        nn.BatchNorm2d(in_channels),
        nn.ReLU(),
        nn.Conv2d(in_channels, out_channels, 1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


def _pooled_head(width: int, classes: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)


class Attention(nn.Module):  # type: ignore[misc]
    """Self-attention with the tensors of `torch.nn.MultiheadAttention`, batch first.

    torch's own attention reads the weight of `out_proj` without calling the layer, so that no adapter can be inserted.
    The two class attributes disable the fused kernel of `torch.nn.TransformerEncoder`.
    """

    batch_first = True
    _qkv_same_embed_dim = False

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.heads, self.dropout = heads, 0.0
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    @classmethod
    def from_torch(cls, attention: nn.MultiheadAttention) -> Attention:
        if (
            attention.in_proj_weight is None
            or attention.bias_k is not None
            or attention.add_zero_attn
            or not attention.batch_first
        ):
            raise ValueError("only self-attention with one input projection, batch first, can be adapted")
        adaptable = cls(attention.embed_dim, attention.num_heads)
        adaptable.dropout = attention.dropout
        adaptable.in_proj_weight, adaptable.in_proj_bias = attention.in_proj_weight, attention.in_proj_bias
        adaptable.out_proj.weight, adaptable.out_proj.bias = attention.out_proj.weight, attention.out_proj.bias
        return adaptable

    def forward(
        self,
        x: torch.Tensor,
        *key_and_value: torch.Tensor,
        need_weights: bool = False,
        is_causal: bool = False,
        **masks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the self-attention of `x`, and None for the weights even with `need_weights`."""
        # torch's layers pass the input again as key and value.
        if (
            any(tensor is not x for tensor in key_and_value)
            or is_causal
            or any(mask is not None for mask in masks.values())
        ):
            raise ModelError("only self-attention without a mask can be adapted: use another network or method")
        n, patches, width = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.view(n, patches, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(width // self.heads), dim=-1)
        mixed = F.dropout(weights, self.dropout, self.training) @ v  # (n, heads, patches, width / heads)
        return self.out_proj(mixed.transpose(1, 2).reshape(n, patches, width)), None


class TransformerBlock(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):  # type: ignore[misc]
    def __init__(
        self, channels: int, size: int, classes: int, patch: int, width: int, depth: int, heads: int, hidden: int
    ) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"size {size} is not a multiple of patch {patch}")
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.place = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2) + self.place  # (n, patches, width)
        return self.head(self.norm(self.blocks(patches)).mean(dim=1))


def vit(
    channels: int,
    size: int,
    classes: int,
    patch: int = 4,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    hidden: int = 0,
) -> nn.Module:
    """Build a vision transformer, by default smaller than ViT-Tiny/16.

    `hidden` is the width between a block's two linear layers, or 0 for 2 * `width`.
    ViT-Tiny/16 has patch 16, width 192, depth 12, heads 3 and hidden 768.
    """
    return ViT(channels, size, classes, patch, width, depth, heads, hidden or 2 * width)


class Conv1d(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int, steps: int, classes: int, width: int, kernel: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        in_channels = channels
        for out_channels in (width, 2 * width, 2 * width):
            layers += [nn.Conv1d(in_channels, out_channels, kernel, padding=kernel // 2), nn.ReLU()]
            if steps >= 4:
                layers.append(nn.MaxPool1d(2))
                steps //= 2
            in_channels = out_channels
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(in_channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x.transpose(1, 2)).mean(dim=2))


def conv1d(channels: int, steps: int, classes: int, width: int = 16, kernel: int = 5) -> nn.Module:
    if kernel % 2 == 0:
        raise ValueError(f"kernel {kernel} is even: give an odd number")
    return Conv1d(channels, steps, classes, width, kernel)


class Gru(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int, classes: int, width: int, layers: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(channels, width, layers, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(x)  # (n, steps, width)
        return self.head(states[:, -1])


def gru(channels: int, steps: int, classes: int, width: int = 32, layers: int = 1) -> nn.Module:
    if steps < 1:
        raise ValueError(f"steps {steps} is below 1")
    return Gru(channels, classes, width, layers)


class Transformer(nn.Module):  # type: ignore[misc]
    def __init__(self, vocabulary: int, length: int, classes: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(1, length, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, 2 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.long()  # engines pass float32
        token_mask = (tokens != 0).to(self.place.dtype).unsqueeze(2)  # (n, length, 1)
        values = (self.embed(tokens) + self.place) * token_mask
        hidden = self.norm(self.blocks(values)) * token_mask
        return self.head(hidden.sum(dim=1) / token_mask.sum(dim=1).clamp(min=1.0))


def transformer(
    vocabulary: int, length: int, classes: int, width: int = 32, depth: int = 2, heads: int = 2
) -> nn.Module:
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}")
    return Transformer(vocabulary, length, classes, width, depth, heads)
