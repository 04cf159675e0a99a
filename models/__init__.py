"""Networks and what is done to them; the tables of those there are, as `fedquilt.models.mlp(64, [32], 10)`."""

from fedquilt.models.networks.tables import (
    cnn,
    lenet,
    mlp,
    module,
    plain,
    residual,
    resnet_cifar,
    rezero,
    separable,
    torchvision,
    vit,
)

__all__ = [
    "cnn",
    "lenet",
    "mlp",
    "module",
    "plain",
    "residual",
    "resnet_cifar",
    "rezero",
    "separable",
    "torchvision",
    "vit",
]
