"""Tiers and coverage, on a fleet small enough to count by hand."""

import pytest
from plain import budgeted

from fedquilt.core import Profile, WorkEstimate
from fedquilt.costs import peak_memory
from fedquilt.costs.peak_memory import ASSUMED_BASE_BYTES, FIRST_USE_BYTES, TierCoverage, TierDevice

MB, GB = 10**6, 10**9


def device(budget_bytes: int, *engines: str) -> Profile:
    return budgeted(budget_bytes, engines=engines or ("torch", "onnx"))


@pytest.mark.parametrize(
    ("budget_bytes", "name"),
    [
        (0, "under 1GB"),
        (GB - 1, "under 1GB"),
        (GB, "1GB"),
        (2 * GB - 1, "1GB"),
        (2 * GB, "2GB"),
        (7 * GB, "4GB"),
        (8 * GB, "8GB"),
        (64 * GB, "8GB"),
    ],
)
def test_a_tier_is_the_largest_that_the_budget_reaches(budget_bytes, name):
    assert peak_memory.tier_from_profile(device(budget_bytes)) == name


def test_a_device_that_has_not_said_what_it_is_has_no_tier():
    assert peak_memory.tier_from_profile(None) == ""


def test_work_fits_a_device_up_to_the_last_byte_beside_the_engine():
    room = GB - ASSUMED_BASE_BYTES["torch"] - FIRST_USE_BYTES["torch"]
    assert peak_memory.fits_budget(device(GB).budget_bytes, ("torch",), WorkEstimate(peak_bytes=room))
    assert not peak_memory.fits_budget(device(GB).budget_bytes, ("torch",), WorkEstimate(peak_bytes=room + 1))


def test_coverage_counts_devices_and_examples_by_tier():
    """1.5 GB of training: of ten devices in the paper's shares, those with 2 GB and more, 7 of 10."""
    fleet = [TierDevice(device(size * GB), examples=10 * size) for size in (1, 1, 1, 2, 2, 2, 4, 4, 4, 8)]
    found = peak_memory.tier_coverage(fleet, ["torch"], WorkEstimate(peak_bytes=1500 * MB))
    assert found == {
        "1GB": TierCoverage(3, 0, 30, 0),
        "2GB": TierCoverage(3, 3, 60, 60),
        "4GB": TierCoverage(3, 3, 120, 120),
        "8GB": TierCoverage(1, 1, 80, 80),
    }
    told = peak_memory.format_coverage(fleet, ["torch"], WorkEstimate(peak_bytes=1500 * MB))
    assert told[0] == (
        "could take part (torch engine 251 MB assumed + work 1.5 GB of budget 1 GB to 8 GB): 7 of 10 devices, "
        "260 of 290 examples"
    )
    assert told[1] == "  1GB: 0 of 3 devices, 0 of 30 examples"
    assert len(told) == 5


def test_a_device_takes_part_with_any_engine_that_it_has_and_that_fits():
    work = WorkEstimate(peak_bytes=400 * MB)
    small = TierDevice(device(500 * MB))
    assert peak_memory.tier_coverage([small], ["torch"], work)["under 1GB"].capable == 0
    assert peak_memory.tier_coverage([small], ["torch", "onnx"], work)["under 1GB"].capable == 1
    assert peak_memory.tier_coverage([TierDevice(device(8 * GB, "numpy"))], ["torch", "onnx"], work)["8GB"].capable == 0


def test_devices_that_have_not_said_how_many_examples_they_have_are_told_as_such():
    known, unknown = TierDevice(device(GB), 7), TierDevice(device(GB))
    work = WorkEstimate(peak_bytes=MB)
    told = peak_memory.format_coverage([known, unknown], ["onnx"], work)
    assert told == [
        "could take part (onnx engine 89 MB assumed + work 1 MB of budget 1 GB): 2 of 2 devices, 7 of 7 examples "
        "(1 have not reported their number)"
    ]
    assert peak_memory.format_coverage([unknown], ["torch", "onnx"], WorkEstimate()) == [
        "could take part (torch engine 251 MB assumed + work 0 B of budget 1 GB): 1 of 1 devices"
    ]


def test_an_empty_fleet_covers_nothing():
    assert peak_memory.tier_coverage([], ["onnx"], WorkEstimate()) == {}
    assert peak_memory.format_coverage([], ["onnx"], WorkEstimate()) == []
