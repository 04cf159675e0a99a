"""What an update's manifest has to say: for every method, and in every codec."""

import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt import compression, methods
from fedquilt.arrays import tensors
from fedquilt.coordinator.updates import checks
from fedquilt.core import BlobRef, Encoding, Update, UpdateError, UpdateSchema, Usage
from fedquilt.testing import toy_networks

UNFORESEEN = {"afl", "fedstitch", "genefl"}  # they do not say beforehand what their devices send
MODEL = {"w": np.arange(6000, dtype=np.float32).reshape(60, 100), "n": np.array(3), "b": np.zeros(9, np.float32)}


def update(given: dict[str, Any], **changes: Any) -> Update:
    """An update of these tensors as its manifest tells them."""
    refs = {}
    for name, bundle in given.items():
        payload = tensors.encode_tensors(bundle)
        refs[name] = BlobRef(sha256=f"{len(refs):064x}", size=len(payload))
    plain = {"job": "j", "round": 0, "attempt": 0, "device": "a", "weight": 1.0, "metrics": {}, "usage": Usage()}
    layouts = {name: tensors.layout_from_tensors(bundle) for name, bundle in given.items()}
    return Update(**{**plain, "bundles": refs, "layouts": layouts, **changes})


@pytest.mark.parametrize("name", methods.builtin_names())
def test_what_a_methods_devices_send_fits_what_it_expects(name):
    try:
        _, _, folded, _ = toy_networks.record_run(name)
        mixed = toy_networks.record_run(name + toy_networks.MIXED)[2] if toy_networks.depends_on_memory(name) else []
    except toy_networks.CheckSkipped as skipped:
        pytest.skip(str(skipped))
    method, known = methods.load(name), 0
    for state, given in [*folded, *mixed]:
        found = method.aggregation.schema(state)
        known += found is not None
        checks.require_manifest_fits(update(dict(given.bundles)), found, Encoding())
        if found is not None and found.bundles and given.bundles:
            more = {bundle: {**each, "odd": np.zeros(1, np.float32)} for bundle, each in given.bundles.items()}
            with pytest.raises(UpdateError, match="odd"):
                checks.require_manifest_fits(update(more), found, Encoding())
    assert folded
    assert known or name in UNFORESEEN


@pytest.mark.parametrize("codec", ["raw", "fp16", "int8", "topk"])
@pytest.mark.parametrize("based", [True, False])
def test_a_manifest_is_checked_in_every_codec(codec, based):
    wire = Encoding(codec=codec)
    base = {name: np.zeros_like(array) for name, array in MODEL.items()} if based else {}

    def encoded(model):
        return model if codec == "raw" else compression.encode_bundle(wire, model, base, {})[0]

    given = update({"model": encoded(MODEL)})
    checks.require_manifest_fits(given, UpdateSchema({"model": MODEL}), wire)
    larger = encoded({**MODEL, "w": np.ones((61, 100), np.float32)})
    if codec == "topk":  # it told no shape but that of the base
        larger = {**MODEL, "w#at": np.arange(999, dtype=np.uint16), "w#value": np.ones(999, np.float32)}
        del larger["w"]
    with pytest.raises(UpdateError, match="'w'"):
        checks.require_manifest_fits(update({"model": larger}), UpdateSchema({"model": MODEL}), wire)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bundles": {}}, "it has no bundle 'model'"),
        ({"layouts": {"model": {"w": "f4:60,100"}}}, "tensor names differ: b, n"),
        ({"layouts": {"model": {"w": "f4:100,60", "n": "i8:", "b": "f4:9"}}}, r"has shape \(100, 60\), expected"),
        ({"layouts": {"model": {"w": "f8:60,100", "n": "i8:", "b": "f4:9"}}}, "and its tensors 48044"),
        ({"layouts": {"model": {"w": "i4:60,100", "n": "i8:", "b": "f4:9"}}}, "'w' is int32, expected float32"),
        ({"layouts": {"model": {"w": "O8:60,100", "n": "i8:", "b": "f4:9"}}}, "'w' is described as 'O8:60,100'"),
        ({"layouts": {"model": {"w": "f4:" + ",".join("1" * 17)}}}, "'w' is described as 'f4:"),
        ({"layouts": {"model": {"w": "f4:-1"}}}, "'w' is described as 'f4:"),
    ],
)
def test_a_manifest_that_does_not_fit_says_what_differs(changes, said):
    with pytest.raises(UpdateError, match=said):
        checks.require_manifest_fits(
            update({"model": MODEL}, **changes), UpdateSchema({"model": MODEL}), Encoding(), None
        )
    round = checks.ManifestValidator(UpdateSchema({"model": MODEL}), Encoding())
    assert [round.manifest_problem(update({"model": MODEL})) for _ in range(2)] == ["", ""]
    assert re.search(f"^a: .*{said}", round.manifest_problem(update({"model": MODEL}, **changes)))
    assert round.manifest_problem(update({"model": MODEL})) == ""


def test_a_part_of_what_is_expected_is_taken_and_no_tensor_may_be_larger():
    expected = UpdateSchema({"model": MODEL}, whole=False)
    checks.require_manifest_fits(update({"model": {"w": MODEL["w"][:30]}}), expected, Encoding())
    with pytest.raises(UpdateError, match=r"'b' has shape \(10,\), expected \(9,\) or a part of it"):
        checks.require_manifest_fits(update({"model": {"b": np.zeros(10, np.float32)}}), expected, Encoding())
    with pytest.raises(UpdateError, match="names differ: z"):
        checks.require_manifest_fits(update({"model": {"z": MODEL["b"]}}), expected, Encoding())


def test_without_types_and_shapes_the_bytes_alone_are_bounded_by_the_model():
    plain = update({"model": MODEL}, layouts={})
    checks.require_manifest_fits(plain, UpdateSchema({"model": MODEL}), Encoding())
    large = msgspec.structs.replace(plain, bundles={"model": BlobRef(sha256="0" * 64, size=40_000)})
    with pytest.raises(UpdateError, match="has 40000 bytes, and what was asked for has"):
        checks.require_manifest_fits(large, UpdateSchema({"model": MODEL}), Encoding())
    more = msgspec.structs.replace(plain, bundles={**plain.bundles, "more": BlobRef(sha256="0" * 64, size=4)})
    with pytest.raises(UpdateError, match="bundle 'more' was not asked for"):
        checks.require_manifest_fits(more, UpdateSchema({"model": MODEL}), Encoding())


def test_where_nothing_is_known_beforehand_a_gibibyte_is_the_most():
    given = update({"x": {}}, bundles={"x": BlobRef(sha256="0" * 64, size=(1 << 30) + 1)}, layouts={})
    with pytest.raises(UpdateError, match="larger than 1024 MB"):
        checks.require_manifest_fits(given, None, Encoding())


def test_a_layout_says_what_it_was_made_of():
    given = {**MODEL, "e": np.zeros((0, 4), np.float16), "t": np.ones(3, bool)}
    found = tensors.specs_from_layout(tensors.layout_from_tensors(given))
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (array.shape, array.dtype) for name, array in given.items()
    }
    assert found["w"].nbytes == 4 * math.prod(MODEL["w"].shape)
