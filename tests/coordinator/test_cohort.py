"""Sampling depends on the seed, the round and the device, and on nothing else."""

from fedquilt.coordinator.cohort import sample

FLEET = [f"dev-{i}" for i in range(20)]


def test_the_same_seed_and_round_draw_the_same_devices_in_any_order() -> None:
    """The order in which devices are listed does not matter."""
    assert sample(1, 2, FLEET, 5) == sample(1, 2, list(reversed(FLEET)), 5)


def test_another_round_or_seed_draws_others() -> None:
    """Five of twenty rarely agree by chance."""
    assert len({sample(1, 2, FLEET, 5), sample(1, 3, FLEET, 5), sample(2, 2, FLEET, 5)}) == 3


def test_a_device_that_leaves_changes_no_other_devices_draw() -> None:
    """Who was drawn stays drawn when somebody else goes offline."""
    drawn = set(sample(1, 2, FLEET, 5))
    gone = next(device for device in FLEET if device not in drawn)
    assert set(sample(1, 2, [d for d in FLEET if d != gone], 5)) == drawn


def test_every_device_is_drawn_about_equally_often() -> None:
    """400 rounds of 5 among 20: 100 each on average."""
    counts = dict.fromkeys(FLEET, 0)
    for round in range(400):
        for device in sample(7, round, FLEET, 5):
            counts[device] += 1
    assert 65 < min(counts.values()) <= max(counts.values()) < 135


def test_asking_for_more_than_there_are_gives_all() -> None:
    """And none gives none."""
    assert sample(0, 0, FLEET, 99) == tuple(sorted(FLEET))
    assert sample(0, 0, [], 3) == ()
