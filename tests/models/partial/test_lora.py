"""Low-rank adapters: where they go, that they change nothing at first, and that they melt into the weights."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.core import ModelError
from fedquilt.models.partial import lora

torch = pytest.importorskip("torch", reason="adapters are tried in torch networks")

from torch import nn  # noqa: E402

from fedquilt.host.torchvision_compat import import_torchvision  # noqa: E402
from fedquilt.models.networks import registry, traces  # noqa: E402
from fedquilt.models.networks.architectures import Attention  # noqa: E402
from fedquilt.models.partial import adapter_layers  # noqa: E402

VIT = {"name": "vit", "channels": 1, "size": 8, "patch": 4, "width": 8, "depth": 2, "heads": 2, "classes": 3}
MLP = {"name": "mlp", "inputs": 6, "hidden": [5, 4], "classes": 3}


def held(module: Any) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}


def spots_of(module: Any, shape: tuple[int, ...]) -> Any:
    return lora.find_adapted_layers(traces.trace_register(module, tuple(shape)))


def filled(module: Any, values: dict[str, np.ndarray]) -> Any:
    module.load_state_dict({name: torch.tensor(array) for name, array in values.items()})
    return module.eval()


def torchvision_vit() -> Any:
    """Torchvision's own class, small."""
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed: its transformer is adapted here")
    found = import_torchvision().models.VisionTransformer
    torch.manual_seed(0)
    made = found(image_size=8, patch_size=4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=3)
    nn.init.normal_(made.heads.head.weight)  # torchvision's is zero at first
    return made.eval()


NETWORKS = {
    "vit": (lambda: registry.load_network(VIT, seed=1), (4, 1, 8, 8)),
    "torchvision": (torchvision_vit, (4, 3, 8, 8)),
    "mlp": (lambda: registry.load_network(MLP, seed=1), (4, 6)),
}
each = pytest.mark.parametrize("name", NETWORKS)


def adapted(name: str, *, own: bool = False, trained: bool = False) -> tuple[Any, Any, dict[str, np.ndarray], Any]:
    """The plain network, an adapted copy, all tensors of that copy, and inputs."""
    make, shape = NETWORKS[name]
    plain, copy = make(), make()
    model = held(plain)
    spots = spots_of(plain, shape[1:])
    values = {**model, **lora.initial_shared_adapters(model, spots, 2, tensors.seeded_rng("a"))}
    if own:
        values.update(lora.initial_own_branch(model, spots, 2, tensors.seeded_rng("b"), 0.0))
    if trained:
        draws = tensors.seeded_rng("c")
        values.update({k: draws.normal(size=v.shape).astype(np.float32) for k, v in values.items() if k not in model})
    copy = filled(adapter_layers.insert_adapters(copy, spots, 2, 8.0, with_own_branch=own), values)
    return plain, copy, values, torch.tensor(tensors.seeded_rng("x").normal(size=shape).astype(np.float32))


@each
def test_with_b_zero_the_adapted_network_is_the_backbone(name):
    """B = 0 at first: the same scores, whatever A is."""
    plain, copy, values, x = adapted(name)
    assert any(np.any(value) for key, value in values.items() if key.endswith("lora_a"))
    torch.testing.assert_close(copy(x), plain(x), rtol=1e-5, atol=1e-5)


@each
def test_adapters_melt_into_the_weights(name):
    plain, copy, values, x = adapted(name, trained=True)
    model = held(plain)
    wanted = copy(x)
    assert (wanted - plain(x)).abs().max() > 0.01
    melted = lora.merge_shared(model, values, spots_of(plain, x.shape[1:]), 8.0)
    assert melted.keys() == model.keys()
    torch.testing.assert_close(filled(plain, melted)(x), wanted, rtol=1e-4, atol=1e-4)


@each
def test_a_shut_gate_leaves_the_shared_branch_alone(name):
    """a = -100: a trained branch of the device's own counts for nothing; at 0 it counts."""
    _, copy, values, x = adapted(name, own=True, trained=True)
    make, shape = NETWORKS[name]
    spots = spots_of(make(), shape[1:])
    alone = {
        key: value for key, value in values.items() if key.rpartition(".")[2] not in (*lora.OWN_SUFFIXES, lora.GATE)
    }
    shared = filled(adapter_layers.insert_adapters(make(), spots, 2, 8.0), alone)
    for logit, same in ((-100.0, True), (0.0, False)):
        gates = {f"{spot.block}.gate": np.array(logit, np.float32) for spot in spots}
        found = filled(copy, {**values, **gates})(x)
        assert torch.allclose(found, shared(x), rtol=0, atol=1e-6) is same


def test_both_branches_add_up_as_eq_4_on_outputs():
    """x = [1, 2], W = 0, A_g = A_p = [[1], [1]], B_g = [[1]], B_p = [[10]], s = 2: 2*3 + 0.5*2*30 = 36."""
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    network = adapter_layers.insert_adapters(
        nn.Sequential(layer), [lora.AdapterSite("0", ("0",))], 1, 2.0, with_own_branch=True
    )
    one = {"0.lora_a": [[1.0], [1.0]], "0.lora_b": [[1.0]], "0.own_a": [[1.0], [1.0]], "0.own_b": [[10.0]]}
    values = {"0.weight": [[0.0, 0.0]], "0.gate": 0.0, **one}
    filled(network, {name: np.array(value, np.float32) for name, value in values.items()})
    assert network(torch.tensor([[1.0, 2.0]])).item() == 36.0


def test_every_gate_has_a_gradient_from_the_first_step():
    """B_p begins as noise: with B_p = 0 it would be 0, and the gate would never move."""
    _, copy, _, x = adapted("vit", own=True)
    copy(x).square().sum().backward()
    gates = [value for name, value in copy.named_parameters() if name.endswith(".gate")]
    assert len(gates) == 2
    assert all(float(value.grad.abs()) > 0 for value in gates)


def test_a_transformers_attention_and_feed_forward_outputs_are_adapted():
    spots = spots_of(registry.load_network({**VIT, "depth": 11}), (1, 8, 8))
    assert spots[10] == lora.AdapterSite("blocks.10", ("blocks.10.attention.out_proj", "blocks.10.mlp.2"))
    last = "encoder.layers.encoder_layer_1"
    assert spots_of(torchvision_vit(), (3, 8, 8))[1] == lora.AdapterSite(
        last, (f"{last}.self_attention.out_proj", f"{last}.mlp.3")
    )


def test_without_attention_every_linear_layer_but_the_head_is_a_block():
    assert spots_of(registry.load_network(MLP), (6,)) == (lora.AdapterSite("1", ("1",)), lora.AdapterSite("3", ("3",)))


def test_a_network_without_linear_layers_before_its_head_is_refused():
    with pytest.raises(ModelError, match="use a transformer"):
        spots_of(registry.load_network({"name": "plain", "channels": 1, "classes": 3}), (1, 8, 8))


@pytest.mark.parametrize("layer", ["nowhere", "blocks.0.norm1"])
def test_a_place_that_is_no_linear_layer_is_refused_by_name(layer):
    with pytest.raises(ModelError, match=f"'{layer}' is not a linear layer"):
        adapter_layers.insert_adapters(registry.load_network(VIT), [lora.AdapterSite("blocks.0", (layer,))], 2, 1.0)


def test_sizes_of_the_shared_part_are_the_papers():
    """r = 8, 100 classes: 148,324 values for ViT-Tiny/16, 592,996 for ViT-Base/16 (heads of 19,300 and 76,900)."""
    for width, hidden, values in ((192, 768, 148_324),):
        table = {"name": "vit", "channels": 3, "size": 224, "patch": 16, "classes": 100, "depth": 12}
        settings = {**table, "width": width, "heads": 3, "hidden": hidden}
        spots = spots_of(registry.build_network({**settings, "size": 16}), (3, 16, 16))
        with torch.device("meta"):
            module = registry.build_network(settings)
        model = {name: np.broadcast_to(np.float32(0), value.shape) for name, value in module.named_parameters()}
        adapters = lora.initial_shared_adapters(model, spots, 8, tensors.seeded_rng(0))
        assert sum(a.size for a in adapters.values()) + model["head.weight"].size + model["head.bias"].size == values


def test_our_attention_gives_what_torchs_gives():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    nn.init.normal_(theirs.in_proj_bias)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(Attention.from_torch(theirs)(x)[0], theirs(x, x, x, need_weights=False)[0])


def test_torchs_own_encoder_is_adapted_and_calls_its_adapters_also_when_it_evaluates():
    """Its fused kernel, which it takes in evaluation mode, would read the weights and pass the adapters over."""
    torch.manual_seed(0)
    network = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1).eval()
    x, layers = torch.randn(3, 5, 8), ("layers.0.self_attn.out_proj", "layers.0.linear1")
    with torch.no_grad():
        before = network(x)
        adapter_layers.insert_adapters(network, [lora.AdapterSite("layers.0", layers)], 2, 1.0)
        torch.testing.assert_close(network(x), before)
        for name, value in network.named_parameters():
            if "lora" in name:
                nn.init.normal_(value)
        moved = network(x)
        assert not torch.allclose(moved, before, atol=0.1)
        torch.testing.assert_close(network.train()(x), moved)


def test_attention_with_a_mask_or_to_another_input_is_refused():
    ours = Attention.from_torch(nn.MultiheadAttention(8, 2, batch_first=True))
    x, other = torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    for ask in (lambda: ours(x, other, other), lambda: ours(x, x, x, attn_mask=torch.ones(5, 5))):
        with pytest.raises(ModelError, match="only self-attention without a mask"):
            ask()


def test_attention_of_another_kind_is_refused():
    network = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, kdim=4, batch_first=True)})
    with pytest.raises(ModelError, match="attention: only self-attention"):
        adapter_layers.insert_adapters(network, [], 2, 1.0)


@pytest.mark.parametrize("odd", [{"patch": 3}, {"heads": 3}])
def test_a_transformer_whose_sizes_do_not_divide_is_refused(odd):
    with pytest.raises(ModelError, match="is not a multiple of"):
        registry.build_network({**VIT, **odd})


def test_the_small_transformer_takes_its_input_and_costs_less_than_a_resnet():
    table = {"name": "vit", "channels": 1, "size": 28, "classes": 10}
    one, two = registry.load_network(table, seed=3), registry.load_network(table, seed=3)
    assert one(torch.zeros(2, *registry.input_shape(table))).shape == (2, 10)
    assert tensors.encode_tensors(held(one)) == tensors.encode_tensors(held(two))
    assert 1e6 < registry.measure_cost(one, registry.input_shape(table)).flops < 40e6
