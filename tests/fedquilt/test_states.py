"""States of methods as bytes: packed, read back, and refused where damaged."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from packed_states import STATE, Inner, State, same_bits

from fedquilt.arrays import tensors
from fedquilt.core import StoreError


def test_a_nested_state_comes_back_equal_in_every_bit():
    assert same_bits(tensors.unpack_state(tensors.pack_state(STATE), State), STATE)


def test_packing_a_state_twice_gives_the_same_bytes():
    packed = tensors.pack_state(STATE)
    assert tensors.pack_state(STATE) == packed
    assert tensors.pack_state(tensors.unpack_state(packed, State)) == packed


def test_a_state_of_another_type_is_refused():
    with pytest.raises(StoreError, match="not a stored Inner"):
        tensors.unpack_state(tensors.pack_state(STATE), Inner)


@dataclass(frozen=True)
class Choice:
    name: str
    score: float = 0.0


@dataclass(frozen=True)
class Chosen:
    name: str
    head: np.ndarray


@dataclass(frozen=True)
class Chooses:
    found: Mapping[int, tuple[Choice, ...]]


@dataclass(frozen=True)
class Chose:
    found: Mapping[int, tuple[Chosen, ...]]


def test_a_state_with_a_field_that_is_not_known_is_refused():
    old = Chose({7: (Chosen("a", np.ones(2)),)})
    with pytest.raises(StoreError, match=r"Chooses\.found\['7'\]\[0\] has unknown fields head: another version"):
        tensors.unpack_state(tensors.pack_state(old), Chooses)
    own = Chooses({7: (Choice("a", 0.5),)})
    assert tensors.unpack_state(tensors.pack_state(own), Chooses) == own


def test_a_state_may_not_hold_what_cannot_be_stored():
    with pytest.raises(TypeError, match="must not contain a range"):
        tensors.pack_state(State({}, (), {}, range(3)))


@dataclass(frozen=True)
class Arithmetic:
    model: dict[str, np.ndarray]
    moments: tuple[dict[str, np.ndarray], ...]
    best: np.ndarray | None
    mean: float
    count: int
    facts: dict[str, Any]


def test_arrays_without_axes_stay_arrays_through_arithmetic_and_storage():
    counter, gain = np.array(7), np.array(0.1, np.float32)
    state = Arithmetic(
        {"seen": np.maximum(counter, counter), "gain": gain + gain, "w": np.ones(2, np.float16)},
        ({"double": gain.astype(np.float64) * 3},),
        gain * 2,
        np.float64(0.1),
        np.int64(3),
        {"lr": np.float32(0.5)},
    )
    assert not isinstance(state.model["seen"], np.ndarray)
    found = tensors.unpack_state(tensors.pack_state(state), Arithmetic)
    for name, array in {**found.model, **found.moments[0], "best": found.best}.items():
        assert isinstance(array, np.ndarray), name
    wanted = {"seen": np.array(7), "gain": np.array(0.2, np.float32), "w": np.ones(2, np.float16)}
    assert same_bits(found.model, wanted)
    assert same_bits(found.moments[0]["double"], np.array(gain.astype(np.float64) * 3))
    assert found.best is not None
    assert same_bits(found.best, np.array(0.2, np.float32))
    assert (found.mean, found.count, found.facts) == (0.1, 3, {"lr": 0.5})


def test_combined_arrays_without_axes_are_arrays():
    one = {"seen": np.array(3), "gain": np.array(0.5, np.float32)}
    found = tensors.map_arrays(np.maximum, one, {"seen": np.array(4), "gain": np.array(0.25, np.float32)})
    assert same_bits(dict(found), {"seen": np.array(4), "gain": np.array(0.5, np.float32)})


def test_a_number_where_an_array_is_annotated_is_told_where_it_stands():
    with pytest.raises(TypeError, match=r"State\.layers\[0\]\.weights\['a'\] is annotated as an array, but is a float"):
        tensors.pack_state(State({}, (Inner({"a": 1.0}, (1, 2)),), {}, ""))


def test_bottomless_states_give_the_named_error():
    with pytest.raises(StoreError):
        tensors.unpack_state(tensors.encode_tensors({}, {"state": "[" * 100_000}), State)
