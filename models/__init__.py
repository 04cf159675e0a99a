"""Networks and operations on networks. `fedquilt.models.mlp(64, [32], 10)` describes a network."""

from fedquilt.models.networks.tables import (
    cnn,
    conv1d,
    gru,
    lenet,
    mlp,
    module,
    plain,
    residual,
    resnet_cifar,
    rezero,
    separable,
    torchvision,
    transformer,
    vit,
)

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
