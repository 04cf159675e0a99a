"""What may follow what, and what comes out."""

from dataclasses import replace

import numpy as np
import pytest

from fedquilt.core import ModelError
from fedquilt.data import inputs
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import joint_head
from fedquilt.models.stitching.stitched_network import Block

RNG = np.random.default_rng(0)


def block(donor: str, index: int, before: tuple[int, ...], after: tuple[int, ...], kind: str = "middle") -> Block:
    return Block(donor, index, kind, ((f"{donor}.{index}.onnx",),), (), before, after, 1, 1, 1, 1)


A0 = block("a", 0, (1, 8, 8), (3, 8, 8), "start")
A1 = block("a", 1, (3, 8, 8), (4, 4, 4))
A2 = block("a", 2, (4, 4, 4), (10,), "end")
B1 = block("b", 1, (5, 4, 4), (5, 4, 4))


def test_only_the_next_block_of_the_same_donor_continues():
    assert stitched_network.is_continuation(A0, A1)
    assert not stitched_network.is_continuation(A0, A2)
    assert not stitched_network.is_continuation(A0, B1)
    assert stitched_network.is_native_path([A0, A1, A2])
    assert not stitched_network.is_native_path([A0, A2])
    assert not stitched_network.is_native_path([A1, A2])


def test_maps_go_to_maps_within_twofold_enlargement():
    assert stitched_network.can_connect(A1, A1)
    wide = block("b", 3, (5, 9, 9), (5, 9, 9))
    assert not stitched_network.can_connect(A1, wide)
    assert stitched_network.can_connect(A1, wide, max_upsampling=3.0)
    assert not stitched_network.can_connect(A2, A1)
    assert not stitched_network.can_connect(A1, A0)


def test_a_junction_resizes_and_then_projects():
    """By hand: averaged 2x2 cells, then weights times channels plus bias."""
    maps = RNG.normal(size=(2, 3, 8, 8)).astype(np.float32)
    junction = {"weights": RNG.normal(size=(5, 3)).astype(np.float32), "bias": np.arange(5, dtype=np.float32)}
    cells = maps.reshape(2, 3, 4, 2, 4, 2).mean(axis=(3, 5))
    want = np.einsum("kc,nchw->nkhw", junction["weights"], cells) + junction["bias"][:, None, None]
    assert np.allclose(stitched_network.apply_junction(maps, junction, B1), want, atol=1e-5)


@pytest.mark.parametrize("wanted", [4, 12])
def test_a_junction_of_series_resizes_and_projects(wanted):
    series = RNG.normal(size=(2, 3, 8)).astype(np.float32)
    junction = {"weights": RNG.normal(size=(5, 3)).astype(np.float32), "bias": np.arange(5, dtype=np.float32)}
    made = stitched_network.apply_junction(series, junction, block("s", 1, (5, wanted), (5, wanted)))
    resized = (
        series.reshape(2, 3, 4, 2).mean(axis=3)
        if wanted == 4
        else inputs.resize_maps(series[:, :, None], 1, 12)[:, :, 0]
    )
    want = np.einsum("kc,ncl->nkl", junction["weights"], resized) + junction["bias"][:, None]
    np.testing.assert_allclose(made, want, atol=1e-5)
    np.testing.assert_allclose(stitched_network.global_average_pool(made), made.mean(axis=2), atol=1e-6)


def test_every_prefix_has_junctions_of_its_own():
    asked = []

    def load(name):
        asked.append(name)
        return {}

    assert stitched_network.load_junctions([A0, A1, B1], load)[:2] == [None, None]
    assert asked == [stitched_network.junction_name(("a.0", "a.1", "b.1"))]
    assert stitched_network.junction_name(("a.0", "b.1")) != asked[0]


def test_alignment_is_logsumexp_within_a_group_and_argmax_over_groups():
    logits = np.log(np.array([[2.0, 2.0, 3.0]]))
    scores = stitched_network.align_logits(logits, [(2,), (0, 1), ()])
    assert np.allclose(np.exp(scores), [[3.0, 4.0, 0.0]])
    assert scores.argmax() == 1
    assert stitched_network.align_logits(np.array([[1e4, 0.0]]), [(0,), (1,)]).tolist() == [[1e4, 0.0]]


HEAD = {"weights": RNG.normal(size=(2, 12)), "bias": RNG.normal(size=2)}
STOCK = stitched_network.DonorPool(
    {"channels": 1, "size": 8}, ("x", "y"), {}, {each.id: each for each in (A0, A1, A2, B1)}
)
JOINED = stitched_network.StitchedNetwork(
    taps=(("a.0", "a.1"), ("a.0", "b.1"), ("a.0",)),
    junctions={
        stitched_network.junction_name(("a.0", "b.1")): {
            "weights": RNG.normal(size=(5, 3)),
            "bias": RNG.normal(size=5),
        },
        stitched_network.junction_name(("b.1", "a.1")): {"weights": np.ones((3, 5)), "bias": np.ones(3)},
    },
    head=HEAD,
)


def made(ran: list[str]) -> stitched_network.Run:
    """Blocks that average cells and repeat channels; each notes that it ran."""

    def run(block: Block, maps: np.ndarray) -> np.ndarray:
        ran.append(block.id)
        channels, size = block.out_shape[0], block.out_shape[1]
        return np.resize(
            inputs.resize_maps(maps, size, size).transpose(1, 0, 2, 3), (channels, len(maps), size, size)
        ).transpose(1, 0, 2, 3)

    return run


def test_taps_are_pooled_side_by_side_and_what_they_share_runs_once():
    ran = []
    x = RNG.normal(size=(4, 1, 8, 8)).astype(np.float32)
    scores = stitched_network.compute_label_scores(JOINED, STOCK.blocks, made(ran), x)
    assert ran == ["a.0", "a.1", "b.1"]
    stem = made([])(A0, x)
    junction = JOINED.junctions[stitched_network.junction_name(("a.0", "b.1"))]
    maps = made([])(A1, stem), made([])(B1, stitched_network.apply_junction(stem, junction, B1)), stem
    features = np.concatenate([each.mean(axis=(2, 3)) for each in maps], axis=1)
    np.testing.assert_allclose(scores, features @ HEAD["weights"].T + HEAD["bias"], rtol=1e-6)


def test_an_artefact_holds_the_network_and_no_junction_besides():
    meta, arrays = stitched_network.to_artefact(JOINED, STOCK)
    name = stitched_network.junction_name(("a.0", "b.1"))
    assert meta["taps"] == [["a.0", "a.1"], ["a.0", "b.1"], ["a.0"]]
    assert meta["junctions"] == {
        name: {"in_shape": [3, 8, 8], "out_shape": [5, 4, 4], "weights": f"{name}.weights", "bias": f"{name}.bias"}
    }
    assert set(arrays) == {f"{name}.weights", f"{name}.bias", "head.weights", "head.bias"}
    read, x = stitched_network.from_artefact(meta, arrays), RNG.normal(size=(2, 1, 8, 8)).astype(np.float32)
    scores = [stitched_network.compute_label_scores(each, STOCK.blocks, made([]), x) for each in (JOINED, read)]
    np.testing.assert_array_equal(*scores)


@pytest.mark.parametrize(
    ("network", "why"),
    [
        (stitched_network.StitchedNetwork((("a.0",),), {}), "neither a head nor an alignment"),
        (stitched_network.StitchedNetwork((("a.0",),), {}, align=((), ())), "neither a head nor an alignment"),
        (
            stitched_network.StitchedNetwork((("a.0",), ("a.0", "a.1")), {}, align=((0,), (1,))),
            "joins 2 taps without a head",
        ),
        (stitched_network.StitchedNetwork((), {}, HEAD), "no taps"),
        (stitched_network.StitchedNetwork(((),), {}, HEAD), "without blocks"),
    ],
)
def test_a_network_whose_outputs_mean_nothing_is_refused(network, why):
    with pytest.raises(ModelError, match=why):
        stitched_network.compute_label_scores(network, STOCK.blocks, lambda block, x: x, np.zeros((1, 1, 8, 8)))
    meta = {"taps": network.taps, "junctions": {}, "head": None, "align": network.align}
    if network.head is not None:
        meta["head"] = {"weights": "w", "bias": "b"}
    with pytest.raises(ModelError, match=why):
        stitched_network.from_artefact(meta, {"w": HEAD["weights"], "b": HEAD["bias"]})


def test_features_may_be_drawn_before_the_head():
    hidden, head = RNG.normal(size=(3, 12)), {"weights": RNG.normal(size=(2, 3)), "bias": np.zeros(2)}
    x = RNG.normal(size=(4, 1, 8, 8)).astype(np.float32)
    maps = stitched_network.run_taps(JOINED, STOCK.blocks, made([]), x)
    features = np.maximum(
        np.concatenate([stitched_network.global_average_pool(each) for each in maps], axis=1) @ hidden.T, 0
    )
    network = replace(JOINED, head={**head, "hidden": hidden})
    scores = stitched_network.compute_label_scores(
        stitched_network.from_artefact(*stitched_network.to_artefact(network, STOCK)), STOCK.blocks, made([]), x
    )
    np.testing.assert_allclose(scores, features @ head["weights"].T, rtol=1e-6)


def test_a_class_that_nobody_has_scores_less_than_any_other():
    stored = {"weights": np.array([[1.0, 2], [5, 5], [3, 4]]), "bias": np.array([-1e29, joint_head.ABSENT_BIAS, 6])}
    head = joint_head.export_head(stored)
    assert head["weights"].tolist() == [[1, 2], [0, 0], [3, 4]]
    assert head["bias"].tolist() == [np.float32(-1e29), -np.inf, 6]
    scores = np.array([[-1e6, -1e6]]) @ head["weights"].T + head["bias"]
    assert scores.argmin() == 1
    assert not np.isnan(scores).any()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda meta: meta.pop("donors"), "has no donor blocks"),
        (lambda meta: meta["blocks"].pop("a.1"), "not start, middle"),
        (lambda meta: meta["donors"]["a"].update(align=[[0]]), "`align` has 1 entries"),
        (lambda meta: meta["blocks"]["a.0"].update(in_shape="big"), "has no donor blocks"),
    ],
)
def test_a_bundle_that_contradicts_itself_is_refused(change, why):
    meta = {
        "input": {"channels": 1, "size": 8},
        "labels": ["x", "y"],
        "donors": {"a": {"blocks": ["a.0", "a.1", "a.2"], "classes": 10}},
        "blocks": {b.id: {name: getattr(b, name) for name in Block.__dataclass_fields__} for b in (A0, A1, A2)},
    }
    assert stitched_network.load_donor_pool(meta).donors["a"].align is None
    change(meta)
    with pytest.raises(ModelError, match=why):
        stitched_network.load_donor_pool(meta)


# -- names -------------------------------------------------------------------------------------------


ACROSS = (*(f"a.{i}" for i in range(4)), "b.2", "b.3", "c.9")


@pytest.mark.parametrize(
    ("taps", "headed", "name"),
    [
        ([["a.0"]], True, "head on a.0"),
        ([["a.0", "a.1", "a.2"], ["b.0", "b.1"]], True, "head on a.2 + b.1"),
        ([ACROSS, ["b.0"]], True, "head on (a.0-3 > b.2 > b.3 > c.9) + b.0"),
        (
            [["a.0"], ["a.0", "a.1"], ["a.0", "a.1", "a.2"], ["a.0", "b.3"], ["b.0"]],
            True,
            "head on a.0-2 + (a.0 > b.3) + b.0",
        ),
        ([["a.0", "a.2"]], True, "head on (a.0 > a.2)"),
        ([["a.0", "a.2", "a.3", "a.4"]], True, "head on (a.0 > a.2-4)"),
        ([["a.0", "a.1", "a.2"]], False, "a.0-2"),
        ([["a.0", "b.1"]], False, "a.0 > b.1"),
        ([["net.v2.9", "net.v2.10", "net.v2.11"]], False, "net.v2.9-11"),
    ],
)
def test_a_network_is_named_by_its_taps(taps, headed, name):
    assert stitched_network.network_name(taps, headed) == name


def test_a_path_of_two_neighbours_is_written_out():
    assert stitched_network.path_name(("a.0", "a.1", "b.2", "b.3")) == "a.0 > a.1 > b.2 > b.3"
