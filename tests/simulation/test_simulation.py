"""Many seeds of lost, doubled, late, swapped and flipped messages, and of crashes on both sides."""

from __future__ import annotations

import pytest

from fedquilt.tools.simulate import Scenario, play, verify

SEEDS = range(240)


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The final state's sha256 when nothing goes wrong."""
    return play(0, Scenario())


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_goes_wrong_the_final_state_is_the_undisturbed_runs(seed: int, undisturbed: str) -> None:
    """Nothing lost, nothing counted twice, rounds only forward, and the same bits."""
    verify(seed, undisturbed)


def test_the_undisturbed_run_does_not_depend_on_the_links_seed(undisturbed: str) -> None:
    """Arrival order is another one with another seed; the state is not."""
    assert play(99, Scenario()) == undisturbed
