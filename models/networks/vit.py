"""Small vision transformer whose attention calls its output projection as a layer.

Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021 (arXiv 2010.11929), section 3.1, with the mean over
patches for the class token (Beyer et al., arXiv 2205.01580), so that a small one learns from few examples.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fedquilt.core import ModelError


class Attention(nn.Module):  # type: ignore[misc]
    """Self-attention with the tensors of `torch.nn.MultiheadAttention`, batch first.

    torch's own attention reads the weight of `out_proj` without a call, so that no adapter could be inserted. The two
    attributes below keep `torch.nn.TransformerEncoder` from its fused kernel.
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
    def from_torch(cls, other: nn.MultiheadAttention) -> Attention:
        """Return the same attention, with the tensors of a torch module.

        Raises:
            ValueError: If the module is not plain self-attention with one input projection, batch first.
        """
        if other.in_proj_weight is None or other.bias_k is not None or other.add_zero_attn or not other.batch_first:
            raise ValueError("only self-attention with one input projection, batch first, can be adapted")
        made = cls(other.embed_dim, other.num_heads)
        made.dropout = other.dropout
        made.in_proj_weight, made.in_proj_bias = other.in_proj_weight, other.in_proj_bias
        made.out_proj.weight, made.out_proj.bias = other.out_proj.weight, other.out_proj.bias
        return made

    def forward(
        self,
        x: torch.Tensor,
        *same: torch.Tensor,
        need_weights: bool = False,
        is_causal: bool = False,
        **masks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the self-attention of `x`, and None for the weights even with `need_weights`.

        Raises:
            ModelError: If the key or value is another tensor, or a mask is given.
        """
        # torch's layers pass the input again as key and value.
        if any(each is not x for each in same) or is_causal or any(mask is not None for mask in masks.values()):
            raise ModelError(
                "only self-attention without a mask can be adapted: take another network, or another method"
            )
        n, patches, width = x.shape
        both = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = both.view(n, patches, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
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
    """Build a vision transformer. `hidden` is the width between a block's two linear layers, or 0 for 2 * `width`.

    ViT-Tiny/16 is patch 16, width 192, depth 12, heads 3, hidden 768.
    """
    return ViT(channels, size, classes, patch, width, depth, heads, hidden or 2 * width)
