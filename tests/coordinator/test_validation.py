"""What a device claims, and what its manifest may say."""

import math
import re
from pathlib import Path
from typing import Any

import hostile_fields
import msgspec
import numpy as np
import plain
import pytest
from evaluations import of_classes, of_numbers, total

from fedquilt import compression, methods, profiles, wire
from fedquilt.arrays import tensors
from fedquilt.coordinator import device_columns
from fedquilt.coordinator.rounds.deadline import DeviceWorkload
from fedquilt.coordinator.updates import sites, validation
from fedquilt.core import (
    BlobRef,
    Encoding,
    EvaluationSums,
    OperatingPoint,
    Profile,
    SiteRight,
    Update,
    UpdateError,
    UpdateSchema,
    Usage,
    WorkEstimate,
    evaluation,
)
from fedquilt.testing import toy_networks

PROFILE = plain.profile(engines=("numpy",))


def of(*watts: float | None, idle_w: float | None = None) -> Profile:
    points = tuple(OperatingPoint(name=f"{i}", busy_w=each, flops_per_s=1e9) for i, each in enumerate(watts))
    return plain.profile(points=points, idle_w=idle_w)


def update(**usage: float) -> Update:
    return plain.update(
        bundles={"m": BlobRef(sha256="0" * 64, size=50), "n": BlobRef(sha256="0" * 64, size=50)}, usage=Usage(**usage)
    )


@pytest.mark.parametrize(
    ("profile", "watts"),
    [
        (None, 1000.0),
        (of(), 1000.0),
        (of(15.0, None, 60.0), 180.0),
        (of(5.0), 100.0),
        (of(1e24), 3000.0),
        (of(idle_w=50.0), 150.0),
    ],
)
def test_a_board_takes_no_more_than_three_times_what_its_profile_says(profile, watts):
    assert validation.highest_power_w(profile) == watts


def test_what_an_honest_board_claims_stays_as_it_is():
    ask, limit_s = DeviceWorkload(WorkEstimate(), of(60.0), 1000), validation.longest_work_s(10.0, 30.0, 1)
    assert limit_s == 120.0
    assert validation.longest_work_s(10.0, 30.0, 3) == 240.0  # this process may have begun in the third attempt
    assert validation.longest_work_s(200.0, 30.0, 3) == 460.0
    given = update(wall_s=120.0, energy_j=180.0 * 120, idle_j=600.0, down_bytes=2000 + (1 << 20), up_bytes=50)
    assert validation.limit_claims(given, validation.ClaimBounds(ask, limit_s)) == (given, "")
    assert validation.limit_claims(given, validation.ClaimBounds(ask, limit_s))[0] is given


def test_what_cannot_be_is_left_out_or_taken_for_the_most_that_can():
    found, odd = validation.limit_claims(
        update(wall_s=1e9, energy_j=1e24, idle_j=1.0, energy_error_j=1.0, down_bytes=10**9, up_bytes=51),
        validation.ClaimBounds(limit_s=120.0),
    )
    usage = found.usage
    assert (usage.wall_s, usage.energy_j, usage.idle_j, usage.energy_error_j) == (120.0, None, None, None)
    assert (usage.down_bytes, usage.up_bytes) == (1 << 20, 50)
    assert odd.count(";") == 3


@pytest.mark.parametrize(("claim", "is_new", "expected"), [(1.0, False, 0.0), (0.0, True, 1.0)])
def test_whether_a_device_is_new_is_what_the_coordinator_knows(claim, is_new, expected):
    given = msgspec.structs.replace(update(), metrics={"new": claim, "loss": 0.5})
    found, odd = validation.limit_claims(given, validation.ClaimBounds(limit_s=120.0, is_new=is_new))
    assert found.metrics == {"new": expected, "loss": 0.5}
    assert odd == f"new = {claim:g}, which the coordinator's records contradict"
    honest = msgspec.structs.replace(given, metrics={"new": expected, "loss": 0.5})
    assert validation.limit_claims(honest, validation.ClaimBounds(limit_s=120.0, is_new=is_new)) == (honest, "")


@pytest.mark.parametrize("name", ["energy_j", "idle_j", "energy_error_j"])
def test_no_joules_of_a_board_are_believed_where_one_number_cannot_be(name):
    found, odd = validation.limit_claims(update(**{name: 1e24}), validation.ClaimBounds(limit_s=120.0))
    assert (found.usage.energy_j, found.usage.idle_j, found.usage.energy_error_j) == (None, None, None)
    assert "1e+24 J" in odd


def test_a_board_is_taken_for_some_speed_whatever_its_profile_says():
    slow = msgspec.structs.replace(PROFILE, points=(OperatingPoint(name="p", flops_per_s=1e-320),))
    bounds = validation.ClaimBounds(DeviceWorkload(WorkEstimate(flops_per_example=1e6), slow), 120.0)
    validation.require_plausible(msgspec.structs.replace(update(), weight=1200.0), bounds, work=True)
    with pytest.raises(UpdateError, match="at 1e\\+06 FLOP/s a device can process 120 examples in 120 s"):
        validation.require_plausible(msgspec.structs.replace(update(), weight=1201.0), bounds, work=True)


@pytest.mark.parametrize("name", ["accuracy", "macro_f1"])
@pytest.mark.parametrize("value", [1e6, 1.01, -0.5])
def test_a_share_beyond_0_to_1_does_not_count(name, value):
    with pytest.raises(UpdateError, match="must be between 0 and 1"):
        validation.require_plausible(
            msgspec.structs.replace(update(), metrics={name: value}), validation.ClaimBounds(), work=False
        )


@pytest.mark.parametrize("name", profiles.board_names())
def test_every_board_that_ships_is_believed_at_its_busiest(name):
    watts = [point.busy_w.value for point in profiles.load_board_profile(name).points if point.busy_w is not None]
    if watts:
        assert max(watts) <= validation.highest_power_w(of(*watts))


# -- sites and weights ----------------------------------------------------------------------------


RIGHT = SiteRight(("cam-*", "door-7"), 2)


@pytest.mark.parametrize(
    ("names", "weights", "said"),
    [
        (("cam-1", "door-7"), (10.0, 10.0), ""),
        (("cam-1", "door-8"), (10.0, 10.0), "site has no right to submit updates of door-8"),
        (("cam-1", "cam-2", "cam-3"), (1.0, 1.0, 1.0), "site submits updates of 3 devices, its site right allows 2"),
        (("cam-1", "cam-2"), (101.0, 0.0), "cam-1 claims weight 101, but at most 100 is plausible"),
        (("cam-1", "cam-2"), (0.0, 0.0), "site claims weight 202, but at most 200 is plausible"),
    ],
)
def test_a_site_speaks_within_its_right(names, weights, said):
    parts = [sites.SiteUpdatePart(name, weight) for name, weight in zip(names, weights, strict=True)]
    given = msgspec.structs.replace(update(), device="site", weight=sum(weights) or 202.0)
    bounds = validation.ClaimBounds(max_weight=100.0, site_right=RIGHT)
    if not said:
        return validation.require_site_right(given, parts, bounds)
    with pytest.raises(UpdateError, match=said):
        validation.require_site_right(given, parts, bounds)


def test_a_device_without_a_right_is_no_site_whatever_its_profile_says():
    said = msgspec.structs.replace(PROFILE, site_device_count=5)
    assert validation.limit_profile(said, None).site_device_count == 0
    assert validation.limit_profile(said, RIGHT).site_device_count == 2
    with pytest.raises(UpdateError, match="a has no right to submit updates of other devices"):
        validation.require_site_right(update(), [], validation.ClaimBounds())


def test_a_site_that_answers_for_itself_counts_as_one_device():
    heavy = msgspec.structs.replace(update(), weight=101.0)
    with pytest.raises(UpdateError, match="weight 101, but at most 100 is plausible"):
        validation.require_plausible(heavy, validation.ClaimBounds(max_weight=100.0, site_right=RIGHT), work=True)


def weighed(**weights: float) -> device_columns.DeviceWeights:
    found = device_columns.DeviceWeights()
    for device, weight in weights.items():
        found.set_number(device, weight)
    return found


def test_a_device_counts_as_a_hundred_others_at_most():
    assert weighed(a=10.0, b=20.0).largest_allowed("z", None) == device_columns.MAX_EXAMPLES
    assert weighed(a=10.0, b=20.0, c=3000.0).largest_allowed("z", None) == 2000.0
    assert weighed(a=10.0, b=20.0, c=30.0, z=1e6).largest_allowed("z", None) == 2000.0
    assert weighed(a=10.0, b=20.0, c=30.0, z=1.0).largest_allowed("z", None) == 2000.0
    assert weighed(a=10.0, b=20.0, z=1.0).largest_allowed("z", None) == device_columns.MAX_EXAMPLES
    assert weighed(a=10.0, b=20.0, c=30.0).largest_allowed("z", 7) == 7
    again = weighed(a=10.0, b=20.0, c=30.0)
    again.set_number("a", 50.0)
    assert again.ascending == [20.0, 30.0, 50.0]


def test_a_device_reports_as_many_examples_as_others_report_where_each_weighs_the_same():
    honest = msgspec.structs.replace(update(examples=1200), evaluation=of_classes(0.5, 300))
    bounds = validation.ClaimBounds(max_weight=100.0, max_examples=120_000.0)
    validation.require_plausible(honest, bounds, work=True)
    assert validation.limit_claims(honest, bounds) == (honest, "")
    assert (
        "120001 examples ignored, as 120000 are the maximum"
        in validation.limit_claims(update(examples=120_001), bounds)[1]
    )
    with pytest.raises(UpdateError, match="evaluation claims 300 examples, at most 299 are possible"):
        validation.require_plausible(honest, validation.ClaimBounds(max_examples=299.0), work=False)


# -- metrics and evaluations ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({f"m{number}": 1.0 for number in range(65)}, "update has 65 metrics, at most 64 are allowed"),
        ({"Loss": 1.0}, "metric name 'Loss' is invalid"),
        ({"\x1b[2J": 1.0}, r"metric name '\\x1b\[2J' is invalid"),
        ({"x" * 41: 1.0}, "metric name 'x{41}' is invalid"),
        ({"loss": float("inf")}, "metric 'loss' is not a finite number"),
    ],
)
def test_metrics_have_few_and_plain_names(metrics, said):
    with pytest.raises(UpdateError, match=said):
        validation.require_plausible(
            msgspec.structs.replace(update(), metrics=metrics), validation.ClaimBounds(), work=False
        )
    with pytest.raises(UpdateError, match=said):
        validation.require_site_right(
            update(), [sites.SiteUpdatePart("cam-1", 1.0, metrics)], validation.ClaimBounds(site_right=RIGHT)
        )


def of_twelve_classes() -> EvaluationSums:
    """Ten right examples of the first of twelve classes."""
    none = [0] * (evaluation.histogram_bins(12) - 1)
    scores = [10, *none, 0, *none, *[0, *none, 10, *none] * 11]
    return EvaluationSums(
        examples=10, outputs=12, counts=evaluation.pack_counts([10]), scores=evaluation.pack_counts(scores)
    )


def test_an_evaluation_of_twelve_classes_is_consistent():
    assert evaluation.find_inconsistency(of_twelve_classes()) == ""


@pytest.mark.parametrize(
    ("sums", "right", "said"),
    [
        (of_classes(0.5), None, ""),
        (total(of_classes(0.5), of_classes(0.75, 4)), RIGHT, ""),
        (of_classes(0.5), RIGHT, "device values that are missing, not in ascending order"),
        (total(of_classes(0.5)), None, "values of several devices, but comes from a single device"),
        (
            total(of_classes(0.5), of_classes(0.7), of_classes(0.7)),
            RIGHT,
            "values of 3 devices, but the site may submit for at most 2",
        ),
        (msgspec.structs.replace(of_classes(0.5), device_values=((0.9, 1),)), RIGHT, "a main metric of 0.5, outside"),
        (msgspec.structs.replace(of_classes(0.5), device_values=((0.5, 1), (1.5, 1))), RIGHT, "not in ascending order"),
        (of_numbers(1.0, 1.0, 5), None, r"1 outputs \(regression\), but the network has 2 \(classes\)"),
        (of_twelve_classes(), None, r"12 outputs \(classes\), but the network has 2 \(classes\)"),
        (
            msgspec.structs.replace(of_numbers(1.0, 1.0, 5), outputs=2),
            None,
            r"2 outputs \(regression\), but the network has 2 \(classes\)",
        ),
        (msgspec.structs.replace(of_classes(0.5), examples=9), None, "the evaluation has counts of 10 examples"),
        (of_classes(0.5, 10, 1e300), None, "a sum that is infinite, not a number or above"),
    ],
)
def test_an_evaluation_is_of_the_jobs_network_and_of_devices_within_a_right(sums, right, said):
    given = msgspec.structs.replace(update(), evaluation=sums)
    bounds = validation.ClaimBounds(site_right=right, outputs=2)
    if not said:
        return validation.require_plausible(given, bounds, work=False)
    with pytest.raises(UpdateError, match=said):
        validation.require_plausible(given, bounds, work=False)


def test_an_evaluation_that_nobody_asked_for_does_not_count():
    given = msgspec.structs.replace(update(), evaluation=of_classes(1.0))
    found, odd = validation.limit_claims(given, validation.ClaimBounds(is_evaluation=False))
    assert (found.evaluation, odd) == (None, "an unrequested evaluation, ignored")


# -- the table ------------------------------------------------------------------------------------


def test_the_documented_table_has_each_field_that_a_device_sends():
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    section = text.split("## What a device claims\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines() if "|" in line]
    documented = [(kind, name) for kind, names, *_ in rows[2:] for name in names.split(", ")]
    assert sorted(documented) == sorted((kind.__name__, name) for kind, name in hostile_fields.fields())
    assert {status for _, _, status, *_ in rows[2:]} == {"verified", "bounded", "informational"}
    sent = {
        *wire.DEVICE_MESSAGES.values(),
        wire.ChunkRequest,
        *(kind for leaf, kind in wire.BLOB_MESSAGES.items() if leaf != "place"),
    }
    assert sent == set(hostile_fields.MESSAGES)  # "place" is the coordinator's


UNFORESEEN = {"afl", "fedstitch", "genefl"}  # they do not say beforehand what their devices send
MODEL = {"w": np.arange(6000, dtype=np.float32).reshape(60, 100), "n": np.array(3), "b": np.zeros(9, np.float32)}


def update_manifest(given: dict[str, Any], **changes: Any) -> Update:
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
        mixed = (
            toy_networks.record_run(name + toy_networks.MIXED_SUFFIX)[2] if toy_networks.depends_on_memory(name) else []
        )
    except toy_networks.CheckSkipped as skipped:
        pytest.skip(str(skipped))
    method, known = methods.load(name), 0
    for state, given in [*folded, *mixed]:
        found = method.aggregation.schema(state)
        known += found is not None
        validation.require_manifest_fits(update_manifest(dict(given.bundles)), found, Encoding())
        if found is not None and found.bundles and given.bundles:
            more = {bundle: {**each, "odd": np.zeros(1, np.float32)} for bundle, each in given.bundles.items()}
            with pytest.raises(UpdateError, match="odd"):
                validation.require_manifest_fits(update_manifest(more), found, Encoding())
    assert folded
    assert known or name in UNFORESEEN


@pytest.mark.parametrize("codec", ["raw", "fp16", "int8", "topk"])
@pytest.mark.parametrize("based", [True, False])
def test_a_manifest_is_checked_in_every_codec(codec, based):
    wire = Encoding(codec=codec)
    base = {name: np.zeros_like(array) for name, array in MODEL.items()} if based else {}

    def encoded(model):
        return model if codec == "raw" else compression.encode_bundle(wire, model, base, {})[0]

    given = update_manifest({"model": encoded(MODEL)})
    validation.require_manifest_fits(given, UpdateSchema({"model": MODEL}), wire)
    larger = encoded({**MODEL, "w": np.ones((61, 100), np.float32)})
    if codec == "topk":  # it told no shape but that of the base
        larger = {**MODEL, "w#at": np.arange(999, dtype=np.uint16), "w#value": np.ones(999, np.float32)}
        del larger["w"]
    with pytest.raises(UpdateError, match="'w'"):
        validation.require_manifest_fits(update_manifest({"model": larger}), UpdateSchema({"model": MODEL}), wire)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bundles": {}}, "bundle 'model' is missing"),
        ({"layouts": {"model": {"w": "f4:60,100"}}}, "tensor names differ: b, n"),
        ({"layouts": {"model": {"w": "f4:100,60", "n": "i8:", "b": "f4:9"}}}, r"has shape \(100, 60\), expected"),
        ({"layouts": {"model": {"w": "f8:60,100", "n": "i8:", "b": "f4:9"}}}, "fewer than its tensors .48044"),
        ({"layouts": {"model": {"w": "i4:60,100", "n": "i8:", "b": "f4:9"}}}, "'w' is int32, expected float32"),
        ({"layouts": {"model": {"w": "O8:60,100", "n": "i8:", "b": "f4:9"}}}, "'w' is described as 'O8:60,100'"),
        ({"layouts": {"model": {"w": "f4:" + ",".join("1" * 17)}}}, "'w' is described as 'f4:"),
        ({"layouts": {"model": {"w": "f4:-1"}}}, "'w' is described as 'f4:"),
    ],
)
def test_a_manifest_that_does_not_fit_says_what_differs(changes, said):
    with pytest.raises(UpdateError, match=said):
        validation.require_manifest_fits(
            update_manifest({"model": MODEL}, **changes), UpdateSchema({"model": MODEL}), Encoding(), None
        )
    round = validation.ManifestValidator(UpdateSchema({"model": MODEL}), Encoding())
    assert [round.manifest_problem(update_manifest({"model": MODEL})) for _ in range(2)] == ["", ""]
    assert re.search(f"^a: .*{said}", round.manifest_problem(update_manifest({"model": MODEL}, **changes)))
    assert round.manifest_problem(update_manifest({"model": MODEL})) == ""


def test_a_part_of_what_is_expected_is_taken_and_no_tensor_may_be_larger():
    expected = UpdateSchema({"model": MODEL}, exact=False)
    validation.require_manifest_fits(update_manifest({"model": {"w": MODEL["w"][:30]}}), expected, Encoding())
    with pytest.raises(UpdateError, match=r"'b' has shape \(10,\), larger than the expected \(9,\)"):
        validation.require_manifest_fits(
            update_manifest({"model": {"b": np.zeros(10, np.float32)}}), expected, Encoding()
        )
    with pytest.raises(UpdateError, match="names differ: z"):
        validation.require_manifest_fits(update_manifest({"model": {"z": MODEL["b"]}}), expected, Encoding())


def test_without_types_and_shapes_the_bytes_alone_are_bounded_by_the_model():
    plain = update_manifest({"model": MODEL}, layouts={})
    validation.require_manifest_fits(plain, UpdateSchema({"model": MODEL}), Encoding())
    large = msgspec.structs.replace(plain, bundles={"model": BlobRef(sha256="0" * 64, size=40_000)})
    with pytest.raises(UpdateError, match="has 40000 bytes, at most"):
        validation.require_manifest_fits(large, UpdateSchema({"model": MODEL}), Encoding())
    more = msgspec.structs.replace(plain, bundles={**plain.bundles, "more": BlobRef(sha256="0" * 64, size=4)})
    with pytest.raises(UpdateError, match="bundle 'more' was not requested"):
        validation.require_manifest_fits(more, UpdateSchema({"model": MODEL}), Encoding())


def test_where_nothing_is_known_beforehand_a_gibibyte_is_the_most():
    given = update_manifest({"x": {}}, bundles={"x": BlobRef(sha256="0" * 64, size=(1 << 30) + 1)}, layouts={})
    with pytest.raises(UpdateError, match="larger than 1024 MB"):
        validation.require_manifest_fits(given, None, Encoding())


def test_a_layout_says_what_it_was_made_of():
    given = {**MODEL, "e": np.zeros((0, 4), np.float16), "t": np.ones(3, bool)}
    found = tensors.specs_from_layout(tensors.layout_from_tensors(given))
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (array.shape, array.dtype) for name, array in given.items()
    }
    assert found["w"].nbytes == 4 * math.prod(MODEL["w"].shape)
