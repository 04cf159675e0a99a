"""Many seeds of lost, doubled, late, swapped and flipped messages, and of crashes on both sides."""

from __future__ import annotations

import pytest

from fedquilt.tools.simulation.faults import Scenario, play, verify

SEEDS = range(240)
WITH_MEMORY = range(1000, 1012)  # seeds for codecs that leave something for the next time


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


@pytest.fixture(scope="module", params=["int8", "topk"])
def remembered(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A codec whose devices remember what they left out, and the undisturbed run's end with it."""
    return request.param, play(0, Scenario(codec=request.param))


@pytest.mark.parametrize("seed", WITH_MEMORY)
def test_what_a_codec_leaves_out_is_told_once_whatever_goes_wrong(
    seed: int, remembered: tuple[str, str], undisturbed: str
) -> None:
    """Lost acknowledgements, tasks done again, killed sides: the bits show a residual that is lost or added twice."""
    codec, ended = remembered
    verify(seed, ended, codec=codec)
    assert ended != undisturbed
