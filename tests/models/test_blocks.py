"""Donors cut into blocks that run in ONNX Runtime."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from fedquilt.core import ModelError

torch = pytest.importorskip("torch", reason="blocks are cut from torch networks")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from torch import nn  # noqa: E402

from fedquilt.models import blocks, zoo  # noqa: E402

PAPER = {"alexnet": 6, "densenet121": 6, "mobilenet_v2": 20, "resnet50": 6, "vgg16": 14}


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [
        *(("torchvision/" + name, 64, count) for name, count in PAPER.items()),
        ("torchvision/squeezenet1_1", 64, 10),
        ("torchvision/shufflenet_v2_x0_5", 64, 6),
        ("torchvision/efficientnet_b0", 64, 10),
        ("torchvision/googlenet", 64, 13),
        ("resnet20-cifar", 32, 5),
    ],
)
def test_running_the_blocks_in_order_is_running_the_network(name: str, size: int, count: int, tmp_path: Path) -> None:
    """At another batch size than exported, to 1e-4 of the largest output; counts are the paper's where it has one."""
    donor = _lively(zoo.build({"name": name, "classes": 10}))
    parts = blocks.split(donor, "donor", (3, size, size), architecture=name.removeprefix("torchvision/"))
    assert len(parts) == count
    assert [part.kind for part in parts] == ["start"] + ["middle"] * (count - 2) + ["end"]
    assert all(len(part.out_shape) == 3 for part in parts[:-1])
    assert [part.in_shape for part in parts[1:]] == [part.out_shape for part in parts[:-1]]
    x = np.random.default_rng(0).normal(size=(3, 3, size, size)).astype(np.float32)
    with torch.no_grad():
        wanted = donor(torch.from_numpy(x)).numpy()
    for part in parts:
        x = _run(part, x, tmp_path)
        assert x.shape[1:] == part.out_shape
    assert np.abs(wanted).max() > 0.01
    np.testing.assert_allclose(x, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)


def test_the_average_pool_is_at_the_head_of_the_terminating_block() -> None:
    """Of squares that are 2 x 2 before the pool, none is pooled away in a middle block."""
    for name in ("resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "densenet121"):
        donor = zoo.build({"name": f"torchvision/{name}"})
        last = blocks.split(donor, name, (3, 64, 64), architecture=name)[-1]
        assert last.in_shape[1:] == (2, 2)


def test_costs_of_a_block_are_those_of_its_operations() -> None:
    """conv 1 -> 2, 3 x 3 on 4 x 4: 2*2*9*16 FLOPs; input 16 + output 32 values alive together at the convolution."""
    start, end = blocks.split(_two_blocks(), "d", (1, 4, 4))
    assert (start.flops, start.activation_bytes) == (576.0, 4 * (32 + 32))  # conv's output and ReLU's
    assert (end.in_shape, end.out_shape, end.flops) == ((2, 4, 4), (3,), 12.0)


def test_a_users_own_network_is_cut_after_the_modules_named(tmp_path: Path) -> None:
    """What runs between the named modules and the next belongs to the next block."""
    donor = _lively(zoo.build({"name": "resnet20-cifar"}))
    parts = blocks.split(donor, "own", (3, 32, 32), cuts=["layer1.0", "layer2"])
    assert [part.out_shape for part in parts] == [(16, 32, 32), (32, 16, 16), (10,)]
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        np.testing.assert_allclose(
            _run(parts[2], _run(parts[1], _run(parts[0], x.numpy(), tmp_path), tmp_path), tmp_path), donor(x), atol=1e-3
        )


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["layer9"], "runs no module 'layer9': name one of bn1, conv1, layer1"),
        (["layer1.0.conv1"], "cannot be cut after 'layer1.0.conv1': more than one value goes on"),
        (["linear"], "cannot be cut after 'linear'"),
        (["layer2", "layer1"], "'layer1' does not come after the one before it"),
    ],
)
def test_a_cut_that_cannot_be_made_is_named(cuts: list[str], message: str) -> None:
    """Unknown, inside a branch, past the maps, out of order."""
    with pytest.raises(ModelError, match=message):
        blocks.split(zoo.build({"name": "resnet20-cifar"}), "own", (3, 32, 32), cuts=cuts)


class Branching(nn.Module):
    """Looks at its input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("donor", "shape", "message"),
    [
        (zoo.build({"name": "mlp", "inputs": 16, "classes": 2}), (1, 4, 4), "before .* no place where a single stack"),
        (Branching(), (1, 4, 4), r"\(Branching\) cannot be traced"),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), (1, 4, 4), "no classifier: it yields"),
        (zoo.build({"name": "plain", "channels": 1, "classes": 2}), (3, 28, 28), "does not take images of 3 x 28 x 28"),
    ],
    ids=["no maps", "branches", "no classifier", "wrong input"],
)
def test_a_donor_that_cannot_be_split_says_why(donor: nn.Module, shape: tuple, message: str) -> None:
    """One error that names the donor and the mend."""
    with pytest.raises(ModelError, match=message):
        blocks.split(donor, "own", shape)


def test_weights_lie_in_one_file_named_by_its_content() -> None:
    """The graph holds no large tensor, and calls the file by its sha256; a small block is all in the graph."""
    large, small = (
        blocks.export(
            blocks.split(zoo.load({"name": "plain", "channels": 1, "classes": 2, "width": w}), "d", (1, 28, 28))[2]
        )
        for w in (16, 4)
    )
    assert large.data is not None
    model = onnx.load_from_string(large.graph)
    external = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert {e.value for t in external for e in t.external_data if e.key == "location"} == {
        hashlib.sha256(large.data).hexdigest()
    }
    assert len(large.graph) < 4096 < large.weight_bytes == 4 * (32 * 32 * 9 + 32)
    assert (small.data, small.weight_bytes) == (None, 4 * (8 * 8 * 9 + 8))


def test_exporting_twice_gives_the_same_bytes_that_old_runtimes_read() -> None:
    """Opset 17 and IR version 8: onnxruntime 1.19 loads both."""
    first, again = (
        [
            blocks.export(b)
            for b in blocks.split(zoo.load({"name": "residual", "channels": 1, "classes": 3}), "d", (1, 28, 28))
        ]
        for _ in range(2)
    )
    assert first == again
    for graph in first:
        model = onnx.load_from_string(graph.graph)
        assert (model.ir_version, [o.version for o in model.opset_import]) == (8, [17])


def _two_blocks() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)
    )


def _lively(model: nn.Module) -> nn.Module:
    """Random weights with which values keep their size through many layers, and narrow hidden linear layers."""
    torch.manual_seed(0)
    for name in ("classifier",) if hasattr(model, "classifier") and isinstance(model.classifier, nn.Sequential) else ():
        head = getattr(model, name)
        widths = [layer for layer in head if isinstance(layer, nn.Linear)]
        if len(widths) > 1:  # 400 MB in VGG-16, which say nothing about its cutting
            setattr(model, name, nn.Sequential(nn.Linear(widths[0].in_features, 16), nn.ReLU(), nn.Linear(16, 10)))
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.bias, -0.1, 0.1)
    return model.eval()


def _run(part: blocks.Block, x: np.ndarray, folder: Path) -> np.ndarray:
    made = blocks.export(part)
    path = folder / hashlib.sha256(made.graph).hexdigest()
    path.write_bytes(made.graph)
    if made.data is not None:
        (folder / hashlib.sha256(made.data).hexdigest()).write_bytes(made.data)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]
