"""Layers are told from names and shapes: a weight tensor, its bias, and the normalisation after it."""

from __future__ import annotations

import numpy as np
import pytest

from fedquilt.core import Tensors
from fedquilt.layers import head, layers


def shaped(network: dict[str, object]) -> Tensors:
    """A network's tensors, sorted by name as a bundle gives them."""
    pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    held = registry.build(network).state_dict()
    return {name: held[name].numpy() for name in sorted(held)}


def test_a_sequence_s_normalisation_goes_with_the_convolution_before_it() -> None:
    """Layers are in the order of their numbers, and running statistics are in none."""
    model = shaped({"name": "plain", "channels": 1, "classes": 3, "width": 2})
    found = layers(model)
    assert list(found) == sorted(found, key=lambda name: [int(part) for part in name.split(".")])
    assert found["0.0"] == ("0.0.weight", "0.1.bias", "0.1.weight")
    assert not any("running" in name or "num_batches" in name for names in found.values() for name in names)
    assert head(model) == list(found)[-1]


def last_by_calls(name: str) -> tuple[str | None, list[str]]:
    """The head of torchvision's network, and the linear layers that give its 1000 classes in evaluation mode."""
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import calls
    from fedquilt.torchvision_compat import torchvision

    params = torchvision().models.regnet.BlockParams
    reckon = params.from_init_params

    def on_cpu(*given: float, **named: float) -> object:  # RegNet reckons its widths in tensors
        with torch.device("cpu"):
            return reckon(*given, **named)

    quiet = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(params, "from_init_params", on_cpu)
        model = torchvision().models.get_model(name, **quiet)
    size = 299 if name == "inception_v3" else 224
    order = calls.trace(model, (3, size, size))
    tensors = {key: np.broadcast_to(np.float32(0), tuple(value.shape)) for key, value in model.state_dict().items()}
    told = [
        path
        for path, each in model.named_modules()
        if isinstance(each, torch.nn.Linear) and each.out_features == 1000 and "aux" not in path.lower()
    ]
    return head(dict(sorted(tensors.items())), order), told


@pytest.mark.parametrize("name", ["convnext_tiny", "vit_b_32", "swin_t", "squeezenet1_1", "googlenet", "mnasnet0_5"])
def test_the_head_of_a_torchvision_classifier_is_the_layer_that_gives_its_classes(name: str) -> None:
    """By the order of calls: names alone take ConvNeXt's `features.7.2.block.5`. SqueezeNet has none."""
    found, told = last_by_calls(name)
    assert [found] == (told or [None])


@pytest.mark.nightly
def test_the_head_of_every_torchvision_classifier_is_the_layer_that_gives_its_classes() -> None:
    """All that torchvision lists, on no device: their tensors take no memory."""
    pytest.importorskip("torch")
    from fedquilt.torchvision_compat import torchvision

    names = torchvision().models.list_models(module=torchvision().models)
    odd = {name: found for name in names for found in [last_by_calls(name)] if [found[0]] != (found[1] or [None])}
    assert len(names) > 70
    assert not odd


def test_the_order_of_calls_is_traced_and_not_told_by_names() -> None:
    """A network whose `classifier` comes before its `encoder` in the alphabet, with a layer that is not called."""
    torch = pytest.importorskip("torch")
    from torch import nn

    from fedquilt.models.networks import calls

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(8, 3)
            self.encoder = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True))
            self.a_first = nn.Linear(6, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            value = self.encoder[0](self.a_first(x))[:, None]
            return self.classifier(self.encoder[1](value, value, value)[0][:, 0])

    model = Net()
    held = {name: value.numpy() for name, value in sorted(model.state_dict().items())}
    assert head(held) == "encoder.1.out_proj"  # natural order: what a bundle without calls has to go by
    order = calls.trace(model, (6,))
    assert model.training
    assert list(layers(held, order)) == ["a_first", "encoder.0", "encoder.1", "encoder.1.out_proj", "classifier"]
    assert head(held, order) == "classifier"


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
