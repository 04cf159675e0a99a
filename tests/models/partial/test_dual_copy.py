"""Networks in two copies: identities that hold for every architecture, and rows of bytes that hold what was seen."""

import copy
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt.core import ModelError, StoreError

torch = pytest.importorskip("torch", reason="the copies are torch networks")

from fedquilt.models.networks import registry  # noqa: E402
from fedquilt.models.partial import output_cache  # noqa: E402
from fedquilt.models.partial.dual_copy import DualCopy  # noqa: E402
from fedquilt.models.partial.output_cache import BatchOutputs, CachedRows, NoRoomError, RowLayout, RowWriter  # noqa: E402

nn = torch.nn

CNN = {"name": "cnn", "channels": 1, "size": 8, "classes": 3, "width": 2}
RESIDUAL = {"name": "residual", "channels": 1, "classes": 3, "width": 4}
WHOLE = ["0", "3", "7", "9"]  # of CNN

NETWORKS: list[tuple[dict[str, Any], list[str], int]] = [
    (CNN, WHOLE, 8),
    (RESIDUAL, ["2", "3", "6"], 16),
    ({"name": "plain", "channels": 1, "classes": 3, "width": 4}, ["3"], 16),
    ({"name": "separable", "channels": 1, "classes": 3, "width": 4}, ["3"], 16),
    ({"name": "resnet20-cifar"}, ["layer3", "linear"], 16),
    ({"name": "torchvision/alexnet", "classes": 10}, ["classifier"], 64),
    ({"name": "torchvision/resnet18", "classes": 10}, ["layer4", "fc"], 32),
    ({"name": "torchvision/squeezenet1_1", "classes": 10}, ["features.12", "classifier"], 64),
    ({"name": "torchvision/mobilenet_v2", "classes": 10}, ["features.17", "features.18", "classifier"], 32),
]


def built(network: dict[str, Any], size: int, spread: float = 1.0) -> tuple[Any, Any]:
    """The network with statistics of batch norm that are not 0 and 1, and examples for it."""
    model = registry.load_network(network, seed=3)
    draw = torch.Generator().manual_seed(5)
    for name, value in model.state_dict().items():
        if name.endswith("running_mean"):
            value.copy_(0.1 * torch.randn(value.shape, generator=draw))
        if name.endswith("running_var"):
            value.copy_(0.5 + torch.rand(value.shape, generator=draw))
    channels = network.get("channels", 3)
    return model, spread * torch.randn(4, channels, size, size, generator=draw)


def filled(module: Any, model: Any) -> Any:
    """A pair or a tail whose both copies hold the network's tensors."""
    held = model.state_dict()
    with torch.no_grad():
        for name, value in module.state_dict().items():
            value.copy_(held[name.partition(".")[2]])
    return module.eval()


def seen_by(dual: DualCopy, network: dict[str, Any], model: Any, x: Any) -> BatchOutputs:
    caught: list[BatchOutputs] = []
    filled(dual.build_observer(registry.build_network(network), caught.append), model)(x)
    return caught[0]


@pytest.mark.parametrize(
    ("network", "trained", "size"),
    [
        pytest.param(*row, id=row[0]["name"], marks=pytest.mark.nightly if "alexnet" in row[0]["name"] else ())
        for row in NETWORKS
    ],
)
def test_two_equal_copies_are_the_network_bit_for_bit(network, trained, size):
    model, x = built(network, size, spread=10.0)
    with torch.no_grad():
        wanted = model(x)
        for pool in ("own", "sk"):
            pair = filled(DualCopy(network, trained, pool=pool).build_copy_pair(copy.deepcopy(model)), model)
            assert torch.equal(pair(x), wanted)


@pytest.mark.parametrize("pool", ["own", "sk"])
@pytest.mark.parametrize(("network", "trained", "size"), NETWORKS[:5], ids=[n["name"] for n, _, _ in NETWORKS[:5]])
def test_rows_that_were_kept_give_what_the_two_copies_give(network, trained, size, pool):
    model, x = built(network, size)
    dual = DualCopy(network, trained, pool=pool)
    seen = seen_by(dual, network, model, x)
    layout = output_cache.make_row_layout(seen, is_float16=False)
    rows = torch.from_numpy(output_cache.pack_rows(seen, layout))
    pair = filled(dual.build_copy_pair(registry.build_network(network)), model)
    tail = filled(dual.build_tail(registry.build_network(network), layout), model)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in pair.qk.named_parameters():
            value.add_(0.3 * torch.randn(value.shape, generator=draw))
            tail.qk.get_parameter(name).copy_(value)
        assert torch.equal(tail(rows), pair(x))
        assert not torch.allclose(pair(x), model(x))


def test_averaging_the_weights_of_one_trained_layer_averages_its_scores():
    model, x = built(CNN, 8)
    for options, linear in (({"pool": "sk"}, True), ({"gates": "own"}, False)):
        scores = []
        for amount in (1.0, -0.5, 0.25):  # the last is the mean of the first two
            pair = filled(DualCopy(CNN, ["3"], **options).build_copy_pair(registry.build_network(CNN)), model)
            with torch.no_grad():
                weight = pair.qk.get_parameter("3.weight")
                weight.add_(amount * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
                scores.append(pair(x))
        assert torch.allclose((scores[0] + scores[1]) / 2, scores[2], rtol=1e-5, atol=1e-5) == linear


def test_no_gradient_reaches_the_frozen_copy():
    model, x = built(RESIDUAL, 16)
    dual = DualCopy(RESIDUAL, ["3", "6"])
    module = filled(dual.build_copy_pair(registry.build_network(RESIDUAL)), model).train()
    module(x).sum().backward()
    assert all(value.grad is None for value in module.frozen.parameters())
    assert all(module.qk.get_parameter(name).grad is not None for name in dual.trained)
    assert all(name.startswith(("3.", "6.", "4.", "5.")) for name in dual.names)


def test_gates_are_the_frozen_copys_however_the_other_one_moves():
    network = {"name": "mlp", "inputs": 4, "hidden": [8], "classes": 3}
    model = registry.load_network(network, seed=0)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    pair = filled(DualCopy(network, ["1"]).build_copy_pair(registry.build_network(network)), model)
    with torch.no_grad():
        before = pair(x) - model[3].bias
        for name in ("1.weight", "1.bias"):
            pair.qk.get_parameter(name).mul_(-1)
        torch.testing.assert_close(pair(x) - model[3].bias, -before)


@pytest.mark.parametrize(("activation", "replaced"), [(nn.GELU(), True), (nn.SiLU(), True), (nn.LeakyReLU(0.2), False)])
def test_other_nonlinearities_become_gates(activation, replaced, monkeypatch):
    """GELU and SiLU become binary gates, as the paper says; leaky ReLU keeps its slope, so nothing changes."""
    model = nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, 3)).eval()
    monkeypatch.setattr(registry, "build_network", lambda network, **more: copy.deepcopy(model))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    pair = filled(DualCopy({"name": "own"}, ["0"]).build_copy_pair(copy.deepcopy(model)), model)
    z = model[0](x)
    wanted = model[2](torch.where(z > 0, z, 0.0)) if replaced else model(x)
    torch.testing.assert_close(pair(x), wanted)


def test_batch_norm_keeps_its_statistics_or_has_its_own():
    model, x = built(RESIDUAL, 16)
    for bn, moves in (("frozen_stats", False), ("train", True)):
        module = filled(
            DualCopy(RESIDUAL, ["3", "6"], bn=bn).build_copy_pair(registry.build_network(RESIDUAL)), model
        ).train()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        module(x)
        changed = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
        assert bool(changed) == moves
        assert not any(name.startswith("frozen.") for name in changed)


def test_gates_of_its_own_make_it_the_network_with_a_frozen_part():
    model, x = built(RESIDUAL, 16)
    pair = filled(DualCopy(RESIDUAL, ["3", "6"], gates="own").build_copy_pair(registry.build_network(RESIDUAL)), model)
    with torch.no_grad():
        for module in (model, pair.qk):
            module.get_parameter("6.weight").mul_(2)
            module.get_parameter("3.conv1.weight").neg_()
        assert torch.equal(pair(x), model(x))


def test_a_network_that_branches_on_values_is_refused_by_name(monkeypatch):
    """It cannot be taken apart."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2)

        def forward(self, x):
            return self.one(x) if x.sum() > 0 else x

    monkeypatch.setattr(registry, "build_network", lambda network, **more: Branching())
    with pytest.raises(ModelError, match="'mine' cannot be traced"):
        DualCopy({"name": "mine"}, ["one"])


def test_a_schedule_that_trains_nothing_is_refused():
    with pytest.raises(ModelError, match="uses no tensor of nowhere"):
        DualCopy(CNN, ["nowhere"])


def seen() -> BatchOutputs:
    draw = torch.Generator().manual_seed(0)
    return BatchOutputs(
        [torch.randn(3, 2, 5, generator=draw)],
        [torch.randint(0, 99, (3, 1, 2, 2), generator=draw)],
        [torch.rand(3, 11, generator=draw) > 0.5, torch.rand(3, 2, 3, generator=draw) > 0.5],
    )


@pytest.mark.parametrize("half", [False, True])
def test_rows_hold_what_was_seen(half):
    """10 values, 4 indices, 11 and 6 bits: 40 + 16 + 2 + 1 bytes filled up to 60; with 16-bit values 20 less."""
    wanted = seen()
    layout = output_cache.make_row_layout(wanted, is_float16=half)
    rows = output_cache.pack_rows(wanted, layout)
    assert rows.shape == (3, 60 - 20 * half)
    value, index, *masks = output_cache.unpack_rows(torch.from_numpy(rows), layout)
    kept = wanted.values[0].half().float() if half else wanted.values[0]
    assert torch.equal(value, kept)
    assert torch.equal(index, wanted.indices[0].int())
    assert all(torch.equal(one, other) for one, other in zip(masks, wanted.masks, strict=True))


def test_values_too_large_for_16_bits_are_refused():
    """Infinity would be kept otherwise."""
    large = seen()._replace(values=[torch.full((3, 1), 1e6)])
    with pytest.raises(ModelError, match="do not fit 16 bits"):
        output_cache.pack_rows(large, output_cache.make_row_layout(large, is_float16=True))


def test_what_is_no_batch_cannot_be_kept():
    with pytest.raises(ModelError, match='set cache = "off"'):
        output_cache.make_row_layout(seen()._replace(values=[torch.zeros(2, 1)]), is_float16=False)


def test_a_file_gives_rows_in_any_order_and_is_found_by_its_key(tmp_path):
    writer = RowWriter(tmp_path / "cache", "train", 6, is_float16=False, limit_bytes=360)
    writer.write_batch(seen())
    writer.write_batch(seen())
    kept = writer.finish("k")
    folder = tmp_path / "cache"
    assert output_cache.find_complete_rows(folder, "train", "k", 6) == kept
    assert output_cache.find_complete_rows(folder, "train", "other", 6) is None
    assert output_cache.find_complete_rows(folder, "train", "k", 5) is None
    assert output_cache.find_complete_rows(folder, "held", "k", 6) is None
    rows = CachedRows(folder / "train.rows", kept)
    wanted = output_cache.pack_rows(seen(), kept.layout)
    np.testing.assert_array_equal(rows[np.array([4, 0])], wanted[[1, 0]])
    whole = (folder / "train.rows").read_bytes()
    (folder / "train.rows").write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    np.testing.assert_array_equal(rows[np.array([4])], wanted[[1]])
    with pytest.raises(StoreError, match=r"is damaged: the next task recreates it"):
        rows[np.array([0])]
    assert output_cache.find_complete_rows(folder, "train", "k", 6) is None
    with (folder / "train.rows").open("ab") as file:
        file.truncate(100)
    assert output_cache.find_complete_rows(folder, "train", "k", 6) is None
    with pytest.raises(StoreError, match="truncated"):
        rows[np.array([4])]
    (folder / "train.rows").unlink()
    with pytest.raises(StoreError, match="cannot read"):
        rows[np.array([0])]
    (folder / "train.json").write_bytes(b'{"key": 1')
    assert output_cache.find_complete_rows(folder, "train", "k", 6) is None


def test_a_file_is_not_begun_where_it_would_be_too_large(tmp_path):
    (tmp_path / "train.rows").write_bytes(b"old")
    with pytest.raises(NoRoomError, match="360 bytes"):
        RowWriter(tmp_path, "train", 6, is_float16=False, limit_bytes=359).write_batch(seen())
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_no_room(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(NoRoomError):
        RowWriter(tmp_path / "cache", "train", 6, is_float16=False, limit_bytes=10**6).write_batch(seen())


def test_a_layout_survives_json():
    layout = output_cache.make_row_layout(seen(), is_float16=True)
    assert msgspec.json.decode(msgspec.json.encode(layout), type=RowLayout) == layout
