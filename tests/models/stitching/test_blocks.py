"""Donors cut into blocks that run in ONNX Runtime."""

import hashlib

import pytest
from block_graphs import graphs_of, only, require_same_outputs

from fedquilt.core import ModelError

torch = pytest.importorskip("torch", reason="blocks are cut from torch networks")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from torch import nn  # noqa: E402

from fedquilt.host.torchvision_compat import import_torchvision  # noqa: E402
from fedquilt.models.networks import registry  # noqa: E402
from fedquilt.models.stitching.onnx import blocks  # noqa: E402

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
def test_running_the_blocks_in_order_is_running_the_network(name, size, count, tmp_path, monkeypatch):
    """At another batch size than exported, to 1e-4 of the largest output; counts are the paper's where it has one.

    Narrowed to 16, the first linear layers of AlexNet (590 kB) and VGG-16 (1.6 MB) are tiled nonetheless.
    """
    monkeypatch.setattr(blocks, "TILE_BYTES", 500_000)
    donor = _lively(registry.build_network({"name": name, "classes": 10}))
    parts = blocks.split_donor(donor, "donor", (3, size, size), architecture=name.removeprefix("torchvision/"))
    assert len(parts) == count
    assert [part.kind for part in parts] == ["start"] + ["middle"] * (count - 2) + ["end"]
    assert all(len(part.out_shape) == 3 for part in parts[:-1])
    assert [part.in_shape for part in parts[1:]] == [part.out_shape for part in parts[:-1]]
    made = [blocks.export_block(part) for part in parts]
    require_same_outputs(made, donor, (3, size, size), tmp_path)
    tiles = {part.index: max(len(stage) for stage in stages) for part, stages in zip(parts, made, strict=True)}
    wide = {"torchvision/alexnet": 2, "torchvision/vgg16": 4}  # 13 and 4 rows to a tile
    assert tiles == {part.index: 1 for part in parts} | ({count - 1: wide[name]} if name in wide else {})


def _convnext() -> nn.Module:
    convnext = import_torchvision().models.convnext
    return convnext.ConvNeXt([convnext.CNBlockConfig(8, 16, 2), convnext.CNBlockConfig(16, None, 1)], num_classes=10)


def _swin(version: int) -> nn.Module:
    swin = import_torchvision().models.swin_transformer
    first = {"block": swin.SwinTransformerBlock, "downsample_layer": swin.PatchMerging}
    second = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
    return swin.SwinTransformer(**sizes, num_classes=10, **(first if version == 1 else second))


@pytest.mark.parametrize(
    ("make", "size", "count"),
    [(_convnext, 32, 5), (lambda: _swin(1), 64, 2), (lambda: _swin(2), 64, 2)],
    ids=["convnext", "swin", "swin_v2"],
)
def test_networks_of_attention_and_layer_norm_are_cut_into_graphs_that_boards_run(make, size, count, tmp_path):
    donor = _lively(make())
    parts = blocks.split_donor(donor, "donor", (3, size, size))
    assert len(parts) == count
    require_same_outputs(map(blocks.export_block, parts), donor, (3, size, size), tmp_path)


def test_costs_of_a_block_are_those_of_its_operations():
    """conv 1 -> 2, 3 x 3 on 4 x 4: 2*2*9*16 FLOPs; input 16 + output 32 values alive together, the ReLU in place."""
    start, end = blocks.split_donor(_two_blocks(), "d", (1, 4, 4))
    ((graph,),) = blocks.export_block(start)
    assert (start.flops, graph.activation_bytes) == (576.0, 4 * (16 + 32))
    assert (end.in_shape, end.out_shape, end.flops) == ((2, 4, 4), (3,), 12.0)


def test_a_users_own_network_is_cut_after_the_modules_named(tmp_path):
    donor = _lively(registry.build_network({"name": "resnet20-cifar"}))
    parts = blocks.split_donor(donor, "own", (3, 32, 32), cuts=["layer1.0", "layer2"])
    assert [part.out_shape for part in parts] == [(16, 32, 32), (32, 16, 16), (10,)]
    require_same_outputs(map(blocks.export_block, parts), donor, (3, 32, 32), tmp_path)


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["layer9"], "runs no module 'layer9': name bn1, conv1, layer1"),
        (["layer1.0.conv1"], "cannot be cut after 'layer1.0.conv1': later modules read other values too"),
        (["linear"], "cannot be cut after 'linear'"),
        (["layer2", "layer1"], "'layer1' runs before the previous cut"),
    ],
)
def test_a_cut_that_cannot_be_made_is_named(cuts, message):
    with pytest.raises(ModelError, match=message):
        blocks.split_donor(registry.build_network({"name": "resnet20-cifar"}), "own", (3, 32, 32), cuts=cuts)


def test_a_network_of_time_series_is_cut_between_its_convolutions(tmp_path):
    donor = _lively(registry.build_network({"name": "conv1d", "channels": 3, "steps": 20, "classes": 4}))
    parts = blocks.split_donor(donor, "donor", (20, 3))
    assert [part.in_shape for part in parts] == [(20, 3), (16, 10), (32, 5), (32, 2)]
    require_same_outputs(map(blocks.export_block, parts), donor, (20, 3), tmp_path)
    with pytest.raises(ModelError, match=r"no module 'layers\.9'"):
        blocks.split_donor(donor, "donor", (20, 3), cuts=["layers.9"])
    with pytest.raises(ModelError, match="cannot read time series of 20 x 4"):
        blocks.split_donor(donor, "donor", (20, 4))


class Swapped(nn.Module):
    """Goes back to channels-last between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv1d(3, 4, 3), nn.LayerNorm(4), nn.Conv1d(4, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.one(x.transpose(1, 2)).transpose(1, 2))
        return self.head(self.two(x.transpose(1, 2)).mean(dim=2))


@pytest.mark.parametrize("cut", ["one", "norm"])
def test_values_that_are_channels_last_are_handed_on_transposed(cut):
    """After the normalisation they are (n, steps, channels): as they are, they would be noise to another donor."""
    donor = Swapped().eval()
    parts = blocks.split_donor(donor, "donor", (20, 3), cuts=[cut])
    assert [(part.in_shape, part.out_shape) for part in parts] == [((20, 3), (4, 18)), ((4, 18), (2,))]
    x = torch.randn(5, 20, 3)
    with torch.no_grad():
        torch.testing.assert_close(parts[1].module(parts[0].module(x)), donor(x))


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
        (
            registry.build_network({"name": "mlp", "inputs": 16, "classes": 2}),
            (1, 4, 4),
            "before .* no module outputs only",
        ),
        (Branching(), (1, 4, 4), r"donor 'own' cannot be traced: .*\(Branching, test_blocks.py"),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), (1, 4, 4), "not a classifier: its output has the shape"),
        (
            registry.build_network({"name": "plain", "channels": 1, "classes": 2}),
            (3, 28, 28),
            "cannot read images of 3 x 28 x 28",
        ),
    ],
    ids=["no maps", "branches", "no classifier", "wrong input"],
)
def test_a_donor_that_cannot_be_split_says_why(donor, shape, message):
    with pytest.raises(ModelError, match=message):
        blocks.split_donor(donor, "own", shape)


def test_weights_lie_in_one_file_named_by_its_content():
    donors = (
        registry.load_network({"name": "plain", "channels": 1, "classes": 2, "width": width}) for width in (16, 4)
    )
    large, small = (only(blocks.export_block(blocks.split_donor(donor, "d", (1, 28, 28))[2])) for donor in donors)
    assert large.data is not None
    model = onnx.load_from_string(large.graph)
    external = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert {e.value for t in external for e in t.external_data if e.key == "location"} == {
        hashlib.sha256(large.data).hexdigest()
    }
    assert len(large.graph) < 4096 < large.weight_bytes == 4 * (32 * 32 * 9 + 32)
    assert (small.data, small.weight_bytes) == (None, 4 * (8 * 8 * 9 + 8))


@pytest.mark.parametrize("tile_bytes", [blocks.TILE_BYTES, 300])
def test_exporting_twice_gives_the_same_bytes_that_old_runtimes_read(tile_bytes, monkeypatch):
    monkeypatch.setattr(blocks, "TILE_BYTES", tile_bytes)
    first, again = (
        [
            blocks.export_block(b)
            for b in blocks.split_donor(
                registry.load_network({"name": "residual", "channels": 1, "classes": 3}), "d", (1, 28, 28)
            )
        ]
        for _ in range(2)
    )
    assert first == again
    for graph in graphs_of(first):
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


def test_a_transformer_splits_before_each_of_its_layers(tmp_path):
    torch.manual_seed(0)
    network = {"name": "vit", "channels": 3, "size": 16, "classes": 10, "depth": 3, "width": 32}
    shape, width, layers, tokens = (3, 16, 16), 32, 3, 16
    model = registry.build_network(network).eval()
    with torch.no_grad():
        for value in model.parameters():  # torchvision's classifier begins with zeros
            value.add_(0.02 * torch.randn_like(value))
    parts = blocks.split_donor(model, "v", shape)
    assert [part.out_shape for part in parts[:-1]] == [(width, tokens)] * (1 + layers)
    assert [part.in_shape for part in parts[1:]] == [(width, tokens)] * (1 + layers)
    each = {round(part.flops) for part in parts[1:-1]}
    products = 2 * tokens * width * (4 * width + 2 * tokens) + 4 * tokens * width * 64
    assert len(each) == 1
    assert each.pop() == pytest.approx(products, rel=0.02)
    made = [blocks.export_block(part) for part in parts]
    require_same_outputs(made, model, shape, tmp_path)
    assert made[1][0][0].activation_bytes > 4 * 2 * width * tokens
