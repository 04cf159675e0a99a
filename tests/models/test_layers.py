"""Layers are told from names and shapes: a weight tensor, its bias, and the normalisation after it."""

from __future__ import annotations

import numpy as np
import pytest

from fedquilt.core import Tensors
from fedquilt.models.layers import head, layers


def shaped(network: dict[str, object]) -> Tensors:
    """A network's tensors, sorted by name as a bundle gives them."""
    pytest.importorskip("torch")
    from fedquilt.models import zoo

    held = zoo.build(network).state_dict()
    return {name: held[name].numpy() for name in sorted(held)}


def test_a_sequence_s_normalisation_goes_with_the_convolution_before_it() -> None:
    """Layers are in the order of their numbers, and running statistics are in none."""
    model = shaped({"name": "plain", "channels": 1, "classes": 3, "width": 2})
    found = layers(model)
    assert list(found) == sorted(found, key=lambda name: [int(part) for part in name.split(".")])
    assert found["0.0"] == ("0.0.weight", "0.1.bias", "0.1.weight")
    assert not any("running" in name or "num_batches" in name for names in found.values() for name in names)
    assert head(model) == list(found)[-1]


def test_a_residual_net_s_normalisation_goes_by_number_and_shortcuts_by_place() -> None:
    """ResNet18: 20 convolutions each with its own batch norm, and the classifier, which is the head."""
    model = shaped({"name": "torchvision/resnet18", "classes": 10})
    found = layers(model)
    assert len(found) == 21
    assert found["layer1.0.conv2"] == ("layer1.0.bn2.bias", "layer1.0.bn2.weight", "layer1.0.conv2.weight")
    assert found["layer2.0.downsample.0"] == tuple(
        f"layer2.0.downsample.{end}" for end in ("0.weight", "1.bias", "1.weight")
    )
    assert all(len(names) == 3 for layer, names in found.items() if layer != "fc")
    assert head(model) == "fc"


def test_a_normalisation_that_nothing_comes_before_is_a_layer_of_its_own() -> None:
    """As in a DenseNet, where it stands before its convolution and has other channels."""
    model = {"norm1.weight": np.ones(3), "norm1.bias": np.ones(3), "conv1.weight": np.ones((4, 3, 1, 1))}
    assert layers(model) == {"conv1": ("conv1.weight",), "norm1": ("norm1.bias", "norm1.weight")}
    assert head(model) is None


def test_numbers_in_names_are_compared_as_numbers() -> None:
    """So the last layer of a long sequence is its last, not its ninth."""
    model = {f"{number}.weight": np.ones((2, 2)) for number in (10, 2, 9)}
    assert list(layers(model)) == ["2", "9", "10"]
    assert head(model) == "10"
