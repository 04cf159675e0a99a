"""Rounds that a device contributed to are a sequence of numbers, however they are kept."""

import random

import pytest

from fedquilt.coordinator.device_columns import NEVER, RoundBitmap


def contributed(*rounds: int) -> RoundBitmap:
    found = NEVER
    for round in rounds:
        found = found.with_round(round)
    return found


@pytest.mark.parametrize("rounds", [(), (0,), (3,), (0, 1, 2), (7, 8, 64, 1000)])
def test_it_reads_as_the_tuple_of_its_rounds(rounds):
    found = contributed(*rounds)
    assert (len(found), tuple(found), bool(found)) == (len(rounds), rounds, bool(rounds))
    assert [round in found for round in range(1002)] == [round in rounds for round in range(1002)]
    assert found.last_round == max(rounds, default=None)
    if rounds:
        assert (found[0], found[-1], found[1:]) == (rounds[0], rounds[-1], list(rounds[1:]))
    else:
        with pytest.raises(IndexError):
            found[-1]
    assert tuple(found.rounds_before(8)) == tuple(round for round in rounds if round < 8)
    assert found.with_round(5000) != found == contributed(*rounds)
    assert "a" not in found
    assert -1 not in found


def test_it_comes_back_from_its_bytes():
    roll = random.Random(1)
    found = contributed(9999, *roll.sample(range(10_000), 1000))
    assert RoundBitmap.from_bytes(found.to_bytes()) == found
    assert hash(RoundBitmap.from_bytes(found.to_bytes())) == hash(found)
    assert len(found.to_bytes()) == 1250
    assert RoundBitmap.from_bytes(NEVER.to_bytes()) == NEVER
