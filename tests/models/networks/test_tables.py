"""Tables made in Python are those that the registry builds networks of."""

from typing import Any

import pytest

from fedquilt import models
from fedquilt.core import ModelError

torch = pytest.importorskip("torch")
registry = pytest.importorskip("fedquilt.models.networks.registry")

MADE: dict[str, dict[str, Any]] = {
    "cnn": models.cnn(1, 8, 10),
    "conv1d": models.conv1d(3, 20, 4),
    "gru": models.gru(3, 20, 4),
    "lenet": models.lenet(1, 8, 10),
    "mlp": models.mlp(64, [32], 10),
    "plain": models.plain(3, 16, 10, mean=[0.5], std=[0.5]),
    "residual": models.residual(3, 16, 10),
    "rezero": models.rezero(64, 10),
    "separable": models.separable(3, 16, 10),
    "transformer": models.transformer(50, 12, 3),
    "vit": models.vit(1, 8, 10),
    "resnet20-cifar": models.resnet_cifar(20),
}


def test_every_small_network_has_a_function():
    assert set(MADE) - {"resnet20-cifar"} == set(registry.ARCHITECTURES)
    assert {table["name"] for table in MADE.values()} == set(MADE)


@pytest.mark.parametrize("name", MADE)
def test_a_table_is_built_and_says_what_an_example_is(name):
    table = MADE[name]
    shape = registry.input_shape(table)
    x = torch.zeros((2, *shape), dtype=torch.int64 if name == "transformer" else torch.float32)
    assert registry.build_network(table).eval()(x).shape == (2, table["classes"])


def test_a_network_of_torchvision_gets_a_new_head_where_classes_differ():
    assert models.torchvision("resnet18", 10, weights="DEFAULT")["weights_classes"] == 1000
    assert models.torchvision("resnet18", 10, weights="IMAGENET1K_V1")["weights_classes"] == 1000
    assert "weights_classes" not in models.torchvision("resnet18", weights="DEFAULT")
    assert "weights_classes" not in models.torchvision("resnet18", 10, weights=__file__)
    assert models.torchvision("resnet18", 10)["input"]["size"] == 224


def test_a_network_of_ones_own_is_named_with_what_its_function_takes():
    table = models.module("nosuch:network", inputs=8, classes=2)
    assert table == {"name": "nosuch:network", "inputs": 8, "classes": 2}
    with pytest.raises(ModelError, match="nosuch"):
        registry.build_network(table)
