"""What a codec makes of an update: identities, bytes by the formula, and bytes that no codec makes."""

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt import compression
from fedquilt.arrays import tensors
from fedquilt.core import CODECS, ClientResult, Encoding, ModelError, Tensors, UpdateError
from fedquilt.formats.tensor_register import register_from_kinds

FP16, INT8 = Encoding(codec="fp16"), Encoding(codec="int8")
LOSSY = [FP16, INT8, Encoding(codec="topk", keep=0.1)]
every = pytest.mark.parametrize("wire", LOSSY, ids=lambda wire: wire.codec)


NOTHING: dict[str, np.ndarray] = {}


def topk(keep: float) -> Encoding:
    return Encoding(codec="topk", keep=keep)


def model(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    shapes = {"conv.weight": (4, 3, 5, 5), "conv.bias": (4,), "fc.weight": (7, 9)}
    return {name: draws.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()}


def frozen(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for array in given.values():
        array.flags.writeable = False
    return given


def there_and_back(wire: Encoding, given: Tensors, base: Tensors, unsent: Tensors = NOTHING) -> tuple[Any, Any]:
    sent, left = compression.encode_bundle(wire, given, base, unsent)
    return compression.decode_bundle(wire, tensors.decode_tensors(tensors.encode_tensors(sent)), base), left


def row(*values: float) -> dict[str, np.ndarray]:
    return {"w": np.array(values, np.float32)}


def test_raw_is_the_answer_itself():
    def never(*given):
        raise AssertionError

    answer = ClientResult({"model": model(0)}, 1.0)
    assert compression.encode_update(Encoding(), answer, never, never) is answer
    assert compression.decode_update(Encoding(), answer.bundles, never) is answer.bundles


def test_fp16_is_exact_where_16_bits_hold_the_difference():
    draws = np.random.default_rng(1)
    base = {"w": (draws.integers(-512, 512, (6, 5)) / 256).astype(np.float32)}
    given = {"w": base["w"] + (draws.integers(-2047, 2048, (6, 5)) / 1024).astype(np.float32)}
    decoded, left = there_and_back(FP16, given, base)
    assert decoded["w"].tobytes() == given["w"].tobytes()
    assert left == {}


def test_fp16_rounds_a_difference_by_less_than_its_2048th_part():
    base, given = model(0), model(1, 0.1)
    decoded, _ = there_and_back(FP16, given, base)
    for name, array in given.items():
        bound = np.abs(array - base[name]) / 2048 + 1e-6
        assert (np.abs(decoded[name] - array) <= bound).all()


def test_int8_takes_steps_of_the_127th_part_of_the_largest():
    sent, left = compression.encode_bundle(INT8, row(128, -62.6, 1.4), row(1, 1, 1), {})
    assert sent["w#int8"].tolist() == [127, -64, 0]
    assert sent["w#step"].tolist() == [1.0]
    np.testing.assert_allclose(left["w"], [0, 0.4, 0.4], atol=1e-5)


def test_what_has_not_moved_costs_int8_no_division():
    assert there_and_back(INT8, row(3, 4), row(3, 4))[0]["w"].tolist() == [3, 4]
    tiny = np.float32(1e-45)
    decoded, left = there_and_back(INT8, {"w": np.full(2, tiny)}, row(0, 0))
    assert decoded["w"].tolist() == [0, 0]
    assert left["w"].tolist() == [tiny, tiny]


def test_topk_tells_the_entries_that_moved_most_and_remembers_the_others():
    zero = row(0, 0, 0, 0)
    sent, left = compression.encode_bundle(topk(0.5), row(1, -5, 3, 0), zero, {})
    assert (sent["w#at"].tolist(), sent["w#value"].tolist()) == ([1, 2], [-5, 3])
    assert compression.decode_bundle(topk(0.5), sent, zero)["w"].tolist() == [0, -5, 3, 0]
    assert left["w"].tolist() == [1, 0, 0, 0]
    decoded, left = there_and_back(topk(0.5), row(2.5, 0, 2, 3), zero, left)
    assert decoded["w"].tolist() == [3.5, 0, 0, 3]
    assert left["w"].tolist() == [0, 0, 2, 0]


def test_of_equals_topk_takes_the_first():
    sent, _ = compression.encode_bundle(topk(0.5), row(1, -2, 1, 1, -1, 1), row(0, 0, 0, 0, 0, 0), {})
    assert sent["w#at"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_topk_takes_what_sorting_would_in_tensors_of_many_blocks(seed):
    draws = np.random.default_rng(seed)
    size, moved = 200_000, np.empty(0)
    match seed:
        case 0 | 1:
            moved = draws.normal(size=size)
        case 2:
            moved = draws.integers(-3, 4, size)
        case 3:
            moved = draws.normal(size=size) * (draws.random(size) < 0.01)
        case _:
            moved = draws.choice([-1, 1], size) * 2.0 ** draws.uniform(-140, 120, size)
    given = {"w": moved.astype(np.float32)}
    sent, left = compression.encode_bundle(topk(0.05), given, {"w": np.zeros(size, np.float32)}, {})
    wanted = np.sort(np.argsort(-np.abs(given["w"]), kind="stable")[: size // 20])
    assert np.array_equal(sent["w#at"], wanted)
    assert np.array_equal(sent["w#value"], given["w"][wanted])
    rest = np.count_nonzero(left.get("w", 0))
    assert rest == np.count_nonzero(given["w"]) - np.count_nonzero(sent["w#value"])


@pytest.mark.parametrize("wire", [INT8, topk(0.05), topk(0.3)], ids=["int8", "topk 0.05", "topk 0.3"])
def test_over_the_rounds_nothing_is_lost(wire):
    told = {name: np.zeros(array.shape) for name, array in model(0).items()}
    meant = {name: np.zeros(array.shape) for name, array in model(0).items()}
    base, left = model(0), {}
    for number in range(1, 101):
        given = {name: base[name] + array for name, array in model(number, 0.01).items()}
        decoded, left = there_and_back(wire, given, base, left)
        for name in base:
            told[name] += decoded[name].astype(np.float64) - base[name]
            meant[name] += given[name].astype(np.float64) - base[name]
        base = decoded
    for name in base:
        np.testing.assert_allclose(told[name] + left.get(name, 0), meant[name], atol=2e-5)
        assert np.abs(left[name]).max() < 0.6  # it stays bounded: the moves add up to some 0.1


@every
def test_a_model_that_has_not_moved_comes_back_in_every_bit(wire):
    decoded, left = there_and_back(wire, model(0), model(0))
    assert tensors.encode_tensors(decoded) == tensors.encode_tensors(model(0))
    assert left == {}


@pytest.mark.parametrize("shape", [(1,), (256,), (257,), (300, 300), (65536,), (40, 41, 42)])
def test_bytes_are_those_of_the_table(shape):
    """2 n; n + 4; k (4 + 1, 2 or 4), k the part that is kept, rounded up."""
    size = int(np.prod(shape))
    given = {"w": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    base = {"w": np.zeros(shape, np.float32)}

    def counted(wire):
        return tensors.total_bytes([compression.encode_bundle(wire, given, base, {})[0]])

    place = 1 if size <= 256 else 2 if size <= 65536 else 4
    assert counted(FP16) == 2 * size
    assert counted(INT8) == size + 4
    assert counted(topk(0.25)) == -(-size // 4) * (4 + place)


@every
def test_only_float32_arrays_that_gradients_move_are_touched(wire):
    wire = msgspec.structs.replace(wire, unchanged=("bn.running_mean", "spread"))
    given = frozen(
        {
            "bn.num_batches_tracked": np.array(7, np.int64),
            "bits": np.arange(9, dtype=np.uint8),
            "scale": np.array(0.3, np.float32),
            "moments": np.random.default_rng(0).normal(size=(3, 3)),
            "theta": np.array([0.1, 0.9], np.float16),
            "nobody": np.zeros((0, 4), np.float32),
            "bn.running_mean": np.array([0.1, 1e-9], np.float32),
            "spread": np.array([1e6, 1e-9], np.float32),
        }
    )
    base = {name: np.ones_like(array) for name, array in given.items()}
    sent, left = compression.encode_bundle(wire, given, base, {})
    assert tensors.encode_tensors(sent) == tensors.encode_tensors(given)
    assert tensors.encode_tensors(compression.decode_bundle(wire, sent, base)) == tensors.encode_tensors(given)
    assert left == {}


@every
def test_names_do_not_decide_what_is_rounded_but_the_register_does(wire):
    kinds = {"a.running_mean": "parameter", "a.weight": "buffer", "b.count": "counter"}
    meta = {"network": {"name": "own"}, "register": register_from_kinds(kinds, kinds)}
    found = compression.exclude_buffers(wire, meta)
    assert found == msgspec.structs.replace(wire, unchanged=("a.weight", "b.count"))
    given = {name: np.array([0.1, 0.7, -3], np.float32) for name in kinds}
    sent, _ = compression.encode_bundle(found, given, {name: 0 * array for name, array in given.items()}, {})
    assert {"a.weight", "b.count"} < sent.keys()
    assert "a.running_mean" not in sent
    mlp = {"network": {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2}}
    assert compression.exclude_buffers(wire, mlp) == compression.exclude_buffers(wire, {}) == wire
    with pytest.raises(ModelError, match="no tensor register of network 'own'"):
        compression.exclude_buffers(wire, {"network": {"name": "own"}})


@every
def test_a_buffer_that_was_rounded_all_the_same_is_refused(wire):
    base = {"v": np.zeros(4, np.float32)}
    sent, _ = compression.encode_bundle(wire, {"v": np.ones(4, np.float32)}, base, {})
    with pytest.raises(UpdateError, match=r"tensor 'v' is a buffer, but was encoded by .*: send it unchanged"):
        compression.decode_bundle(msgspec.structs.replace(wire, unchanged=("v",)), sent, base)


@pytest.mark.parametrize("base", [{}, row(0, 0), {"w": np.zeros(3)}, {"v": np.zeros(3, np.float32)}])
def test_what_has_moved_from_nothing_is_rounded_by_itself_without_memory(base):
    given, unsent = row(127, 0.4, -1), row(9, 9, 9)
    decoded, left = there_and_back(INT8, given, base, unsent)
    assert decoded["w"].tolist() == [127, 0, -1]
    assert left == {}
    assert there_and_back(FP16, given, base)[0]["w"].tolist() == [127, float(np.float16(0.4)), -1]
    sent, left = compression.encode_bundle(topk(0.1), given, base, {})
    assert tensors.encode_tensors(sent) == tensors.encode_tensors(given)
    assert left == {}


@every
def test_nothing_that_is_given_changes(wire):
    given, base = frozen(model(1)), frozen(model(0))
    _, left = there_and_back(wire, given, base)
    sent, _ = compression.encode_bundle(wire, given, base, left)
    compression.decode_bundle(wire, frozen(sent), base)


def test_what_is_left_out_goes_with_the_private_state_and_is_not_the_methods():
    base, answer = {"model": model(0)}, ClientResult({"model": model(1)}, 1.0, private_state={"scores": np.ones(3)})
    told = compression.encode_update(INT8, answer, base.get, dict)
    assert set(told.private_state) == {"scores", *(f"unsent/model/{name}" for name in model(0))}
    assert compression.remove_residuals(told.private_state).keys() == {"scores"}
    sent = tensors.encode_tensors(told.bundles["model"])
    assert not any(array.tobytes() in sent for name, array in told.private_state.items() if name != "scores")


def test_of_what_is_not_sent_this_time_nothing_is_forgotten():
    before = {"unsent/model/w": np.ones(2, np.float32), "unsent/gene/w": np.ones(3, np.float32)}
    told = compression.encode_update(
        INT8, ClientResult({"model": {"v": np.ones(2, np.float32)}}, 1.0), {}.get, lambda: before
    )
    assert {name: array.tolist() for name, array in told.private_state.items()} == {
        "unsent/model/w": [1, 1],
        "unsent/gene/w": [1, 1, 1],
    }


def test_what_is_left_of_another_shape_counts_for_nothing():
    unsent = {"w": np.full(5, 100, np.float32)}
    assert there_and_back(topk(0.5), row(1, 0), row(0, 0), unsent)[0]["w"].tolist() == [1, 0]


@pytest.mark.parametrize("wire", LOSSY, ids=lambda wire: wire.codec)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_never_encoded(wire, value):
    """int8 would make it a number like any other."""
    with pytest.raises(UpdateError, match="'w' holds 1 values that are not finite"):
        compression.encode_update(wire, ClientResult({"model": row(1, value)}, 1.0), {}.get, dict)


def test_what_16_bits_cannot_hold_is_refused_with_the_mend():
    with pytest.raises(UpdateError, match=r"tensor 'w': .*65504, .*\[wire\] codec = 'int8'"):
        compression.encode_bundle(FP16, row(1e5), row(0), {})
    assert there_and_back(INT8, row(1e5), row(0))[0]["w"].tolist() == [1e5]
    with pytest.raises(UpdateError, match="too large for float32"):
        compression.encode_bundle(INT8, row(3e38), row(-3e38), {})


def test_a_name_that_looks_like_a_part_is_refused():
    with pytest.raises(ModelError, match="'w#int8'"):
        compression.encode_bundle(INT8, {"w#int8": np.ones(2, np.float32)}, {}, {})


GOOD_TOPK = {"w#at": np.array([0, 2], np.uint8), "w#value": np.ones(2, np.float32)}
GOOD_INT8 = {"w#int8": np.ones(4, np.int8), "w#step": np.ones(1, np.float32)}


@pytest.mark.parametrize(
    ("wire", "change", "said"),
    [
        (FP16, {"w#fp16": np.ones(4, np.float32)}, "'w': part fp16 has type float32 instead of float16"),
        (FP16, {"w#fp16": np.array([1, np.nan], np.float16)}, "'w#fp16' holds 1 values that are not finite"),
        (FP16, {"w#fp16": np.ones(4, np.float16), "w": np.ones(4, np.float32)}, "'w' has the parts whole, fp16"),
        (INT8, {"w#int8": np.ones(4, np.uint8)}, "instead of int8"),
        (INT8, {"w#step": np.ones(4, np.float32)}, "'w': parts int8 and step are int8 and (4,) float32"),
        (INT8, {"w#step": np.ones(1)}, "float64"),
        (INT8, {"w#step": np.array([np.inf], np.float32)}, "'w#step' holds 1 values that are not finite"),
        (INT8, {"w#step": np.array([-1], np.float32)}, "part step is -1, which is not a number of at least 0"),
        (INT8, {"w#step": None}, "'w' has the parts int8, but int8 needs int8 and step"),
        (INT8, {"w#int8": np.full(4, 127, np.int8), "w#step": np.array([3e38], np.float32)}, "too large"),
        (topk(0.5), {"w#at": np.array([0, 4], np.uint8)}, "beyond the 4 entries"),
        (topk(0.5), {"w#at": np.array([2, 2], np.uint8)}, "repeated"),
        (topk(0.5), {"w#at": np.array([2, 0], np.uint8)}, "out of order"),
        (topk(0.5), {"w#at": np.array([-1, 2], np.int8)}, "unsigned"),
        (topk(0.5), {"w#at": np.array([[0, 2]], np.uint8)}, "instead of 2 unsigned indices"),
        (
            topk(0.5),
            {"w#at": np.array([0], np.uint8), "w#value": np.ones(1, np.float32)},
            "instead of 2 unsigned indices",
        ),
        (topk(0.5), {"w#value": np.ones(2)}, "float64"),
        (topk(0.5), {"w#value": np.array([1, np.nan], np.float32)}, "not finite"),
        (topk(0.5), {"w#value": None}, "tensor 'w' has the parts at, but topk needs at and value"),
        (
            topk(0.5),
            {f"v#{part[2:]}": array for part, array in GOOD_TOPK.items()},
            "'v' was sent as a change (topk), but",
        ),
    ],
)
def test_bytes_that_no_codec_makes_are_refused_by_the_tensors_name(wire, change, said):
    good = {"fp16": {"w#fp16": np.ones(4, np.float16)}, "int8": GOOD_INT8, "topk": GOOD_TOPK}[wire.codec]
    assert compression.decode_bundle(wire, good, row(0, 0, 0, 0)).keys() == {"w"}
    given = {name: array for name, array in {**good, **change}.items() if array is not None}
    with pytest.raises(UpdateError) as caught:
        compression.decode_bundle(wire, given, row(0, 0, 0, 0))
    assert said in str(caught.value)


def test_every_codec_that_is_named_is_there():
    assert ("raw", *compression.LOSSY_CODECS) == CODECS


def test_a_tensor_without_a_start_is_decoded_in_the_memory_of_one():
    wire, counts = Encoding(codec="int8"), np.ones(10_000_000, np.int8)
    tracemalloc.start()
    found = compression.decode_bundle(wire, {"w#int8": counts, "w#step": np.full(1, 0.5, np.float32)}, {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert float(found["w"].min()) == float(found["w"].max()) == 0.5
    assert peak < 45e6
