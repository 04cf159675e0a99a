"""Networks, operations on networks, and tables that describe networks for the [model] of a job.

`fedquilt.models.mlp(64, [32], 10)` describes a network, and builds none. Images come as (channels, size, size), scaled
to 0..1 and normalised as (x - mean) / std. `classes` is the number of outputs also for networks that predict numbers or
several labels (`task` of the job's data).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "cnn",
    "conv1d",
    "gru",
    "lenet",
    "mlp",
    "module",
    "plain",
    "residual",
    "resnet_cifar",
    "rezero",
    "separable",
    "torchvision",
    "transformer",
    "vit",
]

Table = dict[str, Any]


def mlp(inputs: int, hidden: Sequence[int], classes: int) -> Table:
    """Describe a fully connected network with ReLU activations.

    Args:
        inputs: Number of values of one example.
        hidden: Widths of the hidden layers.
        classes: Number of outputs.

    Raises:
        JobError: If `hidden` is a number instead of a list.
    """
    if isinstance(hidden, int):
        from fedquilt.core import JobError  # loads numpy

        raise JobError(f"mlp: hidden is a list of widths: write [{hidden}]")
    return {"name": "mlp", "inputs": inputs, "hidden": list(hidden), "classes": classes}


def rezero(inputs: int, classes: int, *, width: int = 32, blocks: int = 2) -> Table:
    """Describe fully connected residual blocks, each with a learned gain (arXiv 2003.04887)."""
    return {"name": "rezero", "inputs": inputs, "classes": classes, "width": width, "blocks": blocks}


def cnn(channels: int, size: int, classes: int, *, width: int = 16) -> Table:
    """Describe two 5x5 convolutions with pooling and a hidden layer, for square images."""
    return {"name": "cnn", "channels": channels, "size": size, "classes": classes, "width": width}


def lenet(channels: int, size: int, classes: int, *, width: int = 12) -> Table:
    """Describe three 5x5 convolutions with sigmoids, for square images."""
    return {"name": "lenet", "channels": channels, "size": size, "classes": classes, "width": width}


def plain(
    channels: int, size: int, classes: int, *, width: int = 16, mean: Sequence[float] = (), std: Sequence[float] = ()
) -> Table:
    """Describe four 3x3 convolutions with batch norm and pooling."""
    return _image_table("plain", channels, size, classes, width, mean, std)


def residual(
    channels: int, size: int, classes: int, *, width: int = 16, mean: Sequence[float] = (), std: Sequence[float] = ()
) -> Table:
    """Describe a stem and three residual blocks with batch norm."""
    return _image_table("residual", channels, size, classes, width, mean, std)


def separable(
    channels: int, size: int, classes: int, *, width: int = 16, mean: Sequence[float] = (), std: Sequence[float] = ()
) -> Table:
    """Describe a strided stem and four depthwise-separable convolutions."""
    return _image_table("separable", channels, size, classes, width, mean, std)


def vit(
    channels: int, size: int, classes: int, *, patch: int = 4, width: int = 64, depth: int = 4, heads: int = 4
) -> Table:
    """Describe a small vision transformer (arXiv 2010.11929), for square images."""
    table = {"name": "vit", "channels": channels, "size": size, "classes": classes}
    return {**table, "patch": patch, "width": width, "depth": depth, "heads": heads}


def conv1d(channels: int, steps: int, classes: int, *, width: int = 16, kernel: int = 5) -> Table:
    """Describe three convolutions along time, for series and spectrograms (steps, channels)."""
    table = {"name": "conv1d", "channels": channels, "steps": steps, "classes": classes}
    return {**table, "width": width, "kernel": kernel}


def gru(channels: int, steps: int, classes: int, *, width: int = 32, layers: int = 1) -> Table:
    """Describe a gated recurrent network (arXiv 1406.1078), for series (steps, channels)."""
    table = {"name": "gru", "channels": channels, "steps": steps, "classes": classes}
    return {**table, "width": width, "layers": layers}


def transformer(
    vocabulary: int, length: int, classes: int, *, width: int = 32, depth: int = 2, heads: int = 2
) -> Table:
    """Describe a small encoder for texts of `length` tokens out of `vocabulary`."""
    table = {"name": "transformer", "vocabulary": vocabulary, "length": length, "classes": classes}
    return {**table, "width": width, "depth": depth, "heads": heads}


def resnet_cifar(depth: int, classes: int = 10) -> Table:
    """Describe ResNet-20, 32, 44 or 56 for images of 32 x 32 (He et al. 2015, section 4.2)."""
    return {"name": f"resnet{depth}-cifar", "classes": classes, "input": _input_table(3, 32, (), ())}


def torchvision(
    architecture: str,
    classes: int = 1000,
    *,
    weights: str | None = None,
    size: int = 224,
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[float] = (0.229, 0.224, 0.225),
) -> Table:
    """Describe a network of torchvision, such as "resnet18".

    Args:
        architecture: Name in torchvision.models.
        classes: Number of outputs. With a name as `weights`, a number other than 1000 means a new head.
        weights: Name of torchvision's weights such as "DEFAULT", or a file with `classes` outputs, or None for random
            weights.
        size: Size of the images in pixels.
        mean: Mean of each channel, by default ImageNet's.
        std: Standard deviation of each channel, by default ImageNet's.
    """
    table: Table = {
        "name": f"torchvision/{architecture}",
        "classes": classes,
        "input": _input_table(3, size, mean, std),
    }
    if weights is None:
        return table
    head_settings = {} if classes == 1000 or Path(weights).is_file() else {"weights_classes": 1000}
    return {**table, "weights": weights, **head_settings}


def module(name: str, /, **settings: Any) -> Table:
    """Describe a user's network by its factory, which returns a torch.nn.Module.

    Args:
        name: Name "module:function", or of an entry point.
        settings: Arguments of the factory, with the shape of an example: `inputs`, `channels` and `size`, or `input`.
    """
    return {"name": name, **settings}


def _image_table(
    name: str, channels: int, size: int, classes: int, width: int, mean: Sequence[float], std: Sequence[float]
) -> Table:
    table = {"name": name, "channels": channels, "classes": classes, "width": width}
    return {**table, "input": _input_table(channels, size, mean, std)}


def _input_table(channels: int, size: int, mean: Sequence[float], std: Sequence[float]) -> Table:
    normalisation = {"mean": list(mean), "std": list(std)}
    return {"channels": channels, "size": size, **{key: value for key, value in normalisation.items() if value}}
