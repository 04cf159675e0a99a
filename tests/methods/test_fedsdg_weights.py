"""FedSDG on the coordinator: weights of changes, the mean, and the presets."""

from typing import Any

import numpy as np
import pytest
from fedsdg_runs import LAYERS, Played, asked, began

from fedquilt.arrays import tensors
from fedquilt.core import DeviceUpdate, Fit
from fedquilt.methods import fedsdg
from fedquilt.models import local_training

torch_engine = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine", reason="adapters are trained with torch")


# -- weights --------------------------------------------------------------------------------------


def changes(*rows: tuple[float, float]) -> list[dict[str, np.ndarray]]:
    return [{"one.lora_a": np.array(row[:1], np.float32), "two.lora_b": np.array(row[1:], np.float32)} for row in rows]


@pytest.mark.parametrize(
    ("rows", "expected", "agreed"),
    [
        ([(1, 0), (0, 1)], [0.5, 0.5], True),  # the mean is (0.5, 0.5), both cosines 0.7071
        ([(1, 0), (1, 0), (-1, 0)], [0.5, 0.5, 0.0], True),  # cosines 1, 1, -1 with (1/3, 0)
        ([(9, 0), (0, 3)], [0.75, 0.25], True),  # cosines 3/sqrt(10) and 1/sqrt(10) with (4.5, 1.5)
        ([(1, 0), (0, 0)], [1.0, 0.0], True),  # of no length: no direction
        ([(1, 0), (-1, 0)], [0.5, 0.5], False),  # the mean is 0: nothing agrees with it
        ([(0, 0), (0, 0), (0, 0)], [1 / 3, 1 / 3, 1 / 3], False),
        ([(3, 4)], [1.0], True),
    ],
)
def test_a_change_counts_by_its_cosine_with_the_mean(rows, expected, agreed):
    """Eq. 10 by hand, and its fall-backs."""
    found, said = fedsdg.aggregation_weights(changes(*rows), "aligned")
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert said is agreed


def test_the_official_rule_compares_with_the_others():
    """(1,0), (1,0), (-1,0): cosines 0, 0 and -1 with the mean of the others, softmax at 0.05: 1/2, 1/2, e^-20 / 2.

    The head does not count in it; a device alone counts fully.
    """
    rows = changes((1, 0), (1, 0), (-1, 0))
    with_heads = [{**row, "head.weight": np.full(5, 100.0 * i, np.float32)} for i, row in enumerate(rows)]
    for some in (rows, with_heads):
        np.testing.assert_allclose(
            fedsdg.aggregation_weights(some, "others")[0], [0.5, 0.5, np.exp(-20) / 2], atol=1e-9
        )
    assert fedsdg.aggregation_weights(rows[:1], "others")[0] == [1.0]


def folded(state: Any, rows: dict[str, float], examples: float = 7.0) -> Any:
    """The state after a round in which each device's change is this value everywhere."""
    total = None
    for device, value in rows.items():
        delta = {name: np.full_like(array, value) for name, array in state.model.items()}
        total = fedsdg.fold(state, total, DeviceUpdate(device, 0, examples, {}, {"delta": delta}))
        examples += 100  # Eq. 10 does not look at it
    return fedsdg.step(state, total)


def test_a_round_moves_the_shared_part_by_the_weighted_changes():
    """Changes 1, 3 and -1: the last is against the mean and left aside, (1 + 3) / 2 = 2 is added."""
    state = began()
    after = folded(state, {"a": 1.0, "b": 3.0, "c": -1.0})
    for name, array in state.model.items():
        np.testing.assert_allclose(after.model[name], array + 2, rtol=1e-5)
    assert after.told == ("against the mean change, and so left aside: c",)
    assert fedsdg.step(state, None) is state


def test_changes_that_cancel_fall_back_to_the_plain_mean():
    """1 and -1: nothing is added, and the round says why."""
    state = began()
    after = folded(state, {"a": 1.0, "b": -1.0})
    assert all(np.array_equal(after.model[name], array) for name, array in state.model.items())
    assert after.told == ("no change agreed with the mean change: the plain mean was taken",)


def test_no_more_changes_are_held_than_asked_for_and_in_any_order():
    """`most` = 2 of 4 devices: the same two whoever comes first."""
    state = began(most=2)
    rows = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    one, two = folded(state, rows), folded(state, dict(reversed(rows.items())))
    assert tensors.pack_state(one) == tensors.pack_state(two)
    assert one.told == ("2 changes beyond the 2 held at once were left out",)


# -- settings -------------------------------------------------------------------------------------


def test_the_presets_are_the_papers_and_the_official_codes_values():
    """What is given stands; all else is the preset's."""
    paper, official = fedsdg.Params(), fedsdg.Params(preset="official", epochs=2)
    assert (paper.gate, paper.gates, paper.lr_gates, paper.sparsity, paper.own_decay) == (
        0.0,
        "block",
        0.01,
        1e-3,
        1e-4,
    )
    assert (official.gate, official.gates, official.lr_gates) == (-2.0, "layer", 0.1)
    assert (official.sparsity, official.own_decay, official.shared_decay) == (0.01, 0.001, 1e-4)
    assert (paper.aggregation, official.aggregation, official.batch) == ("aligned", "mean", 128)
    assert (paper.epochs, official.epochs) == (1, 2)


def test_the_official_preset_has_a_gate_for_every_layer():
    played = Played("fedsdg", rounds=1, preset="official", tell_gates=True)
    for _, answer in played.worked:
        gates = [name for name in answer.local if name.endswith(".gate")]
        assert sorted(gates) == sorted(f"{layer}.gate" for layer in LAYERS)
        assert len([name for name in answer.metrics if name.startswith("gate.")]) == 4
        assert 0.05 < answer.metrics["gate.00"] < 0.25  # sigmoid(-2) is 0.12


def test_the_trainers_settings_are_the_methods():
    task, _ = asked(began(preset="official", lr=0.004))

    assert local_training.fit_from_task(task) == Fit(epochs=1, batch=16, lr=0.004, optimizer="adam", clip=1.0)
