"""Which part of a network to train: candidates, when the search stops, and a new head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evaluations
import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.core import EvaluationSums, Examples, Fit, Hooks, JobError, ModelError

torch = pytest.importorskip("torch", reason="networks to be scheduled are torch's")

from fedquilt.models.networks import registry  # noqa: E402
from fedquilt.tools.artefacts import frozen_part  # noqa: E402
from fedquilt.tools.artefacts.frozen_part import CalibrationData  # noqa: E402
from fedquilt.tools.artefacts.prepare import prepare_bundle  # noqa: E402

CNN = {"name": "cnn", "channels": 1, "size": 8, "classes": 3, "width": 2}
PARTS = (("0",), ("3",), ("7",), ("9",))
NOTHING = Examples(np.zeros((4, 8, 8), np.uint8), np.zeros(4, int))


class Oracle:
    def __init__(self, *accuracies: float) -> None:
        self.accuracies, self.moved, self.orders = list(accuracies), [], []

    def train(self, network: Any, start: Any, examples: Any, fit: Fit, rng: Any, *, hooks: Hooks) -> Any:
        self.moved.append([name for name in start if hooks.steps[0].rate(name) > 0])
        self.orders.append(rng.integers(2**40))
        return start, {}

    def evaluate(self, network: Any, model: Any, examples: Any) -> EvaluationSums:
        return evaluations.of_classes(self.accuracies[len(self.moved) - 1])


def searched(engine: Any, **changes: Any) -> list[frozen_part.CandidateResult]:
    model = {name: value.numpy() for name, value in registry.load_network(CNN, seed=0).state_dict().items()}
    given: dict[str, Any] = {"held": NOTHING, "parts": PARTS, **changes}
    return frozen_part.search_schedule(
        engine, CNN, model, NOTHING, given["held"], given["parts"], CalibrationData(path="unread")
    )


def test_it_stops_at_the_first_candidate_that_does_no_better() -> None:
    """0.5, 0.7, 0.7: the fourth, which would be best, is not tried. Every one begins anew, in the same order."""
    oracle = Oracle(0.5, 0.7, 0.7, 0.9)
    tried = searched(oracle)
    assert [one.accuracy for one in tried] == [0.5, 0.7, 0.7]
    assert [one.trained for one in tried] == [("9",), ("7", "9"), ("3", "7", "9")]
    assert oracle.moved[1] == ["7.weight", "7.bias", "9.weight", "9.bias"]
    assert len(set(oracle.orders)) == 1


def test_it_ends_with_the_whole_network() -> None:
    assert searched(Oracle(0.1, 0.2, 0.3, 0.4))[-1].trained == ("0", "3", "7", "9")


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(JobError, match="no examples for validation"):
        searched(Oracle(), held=Examples(NOTHING.x[:0], NOTHING.y[:0]))
    with pytest.raises(JobError, match="'layer9' has no tensors"):
        searched(Oracle(), parts=(("layer9",),))


@pytest.mark.parametrize(
    ("network", "first", "last", "count"),
    [
        (CNN, ["0"], ["9"], 4),
        ({"name": "torchvision/alexnet", "classes": 10}, ["features"], ["classifier"], 2),
        ({"name": "torchvision/resnet18", "classes": 10}, ["conv1", "bn1"], ["fc"], 6),
        ({"name": "torchvision/mobilenet_v2", "classes": 10}, ["features.0"], ["classifier"], 20),
        ({"name": "torchvision/squeezenet1_1", "classes": 10}, ["features.0"], ["classifier"], 10),
    ],
)
def test_blocks_are_the_papers_where_it_names_them(network: Any, first: list[str], last: list[str], count: int) -> None:
    """AlexNet features and classifier, ResNet-18 stem, four stages, fc; batch norm goes with its convolution."""
    with torch.device("meta"):
        found = frozen_part.list_blocks(registry.build_network(network))
    assert (found[0], found[-1], len(found)) == (first, last, count)


def digits(path: Path, count: int = 60) -> str:
    draws = np.random.default_rng(0)
    y = draws.integers(0, 3, count)
    x = draws.integers(0, 60, (count, 8, 8)).astype(np.uint8)
    for each, label in zip(x, y, strict=True):
        each[:, 3 * label : 3 * label + 2] += 150
    np.savez(path, x_train=x, y_train=y)
    return str(path)


def test_prepare_finds_the_schedule_of_a_real_network(tmp_path: Path) -> None:
    table = {"path": digits(tmp_path / "d.npz")}
    made = [
        prepare_bundle(
            {"model": CNN, "input": {"channels": 1, "size": 8}, "schedule": table}, tmp_path / f"bundle-{i}"
        ).meta["schedule"]
        for i in range(2)
    ]
    assert made[0] == made[1]
    best = max(made[0]["tried"], key=lambda one: one["accuracy"])
    assert made[0]["trained"] == best["trained"]
    assert made[0]["tried"][0]["trained"] == ["9"]


def test_a_wrong_key_of_the_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"\[schedule\]: there is no key 'block'; did you mean 'blocks'\?"):
        prepare_bundle({"model": CNN, "schedule": {"path": "x", "block": 1}}, tmp_path)


def test_a_new_head_replaces_the_last_layer_alone(tmp_path: Path) -> None:
    """Weights for 7 classes, a network for 3: seven tensors as in the file, the head drawn from the seed."""
    old = {
        name: value.numpy() for name, value in registry.load_network({**CNN, "classes": 7}, seed=4).state_dict().items()
    }
    (tmp_path / "old.safetensors").write_bytes(tensors.encode_tensors(old))
    model = {**CNN, "weights": str(tmp_path / "old.safetensors"), "weights_classes": 7, "seed": 2}
    made = prepare_bundle({"model": model}, tmp_path / "bundle")
    given = made.load("model")
    assert made.meta["network"] == CNN
    for name, array in given.items():
        if name.startswith("9."):
            np.testing.assert_array_equal(array, registry.load_network(CNN, seed=2).state_dict()[name].numpy())
        else:
            np.testing.assert_array_equal(array, old[name])


def test_weights_for_the_same_classes_leave_no_head_to_replace(tmp_path: Path) -> None:
    old = {name: value.numpy() for name, value in registry.load_network(CNN, seed=4).state_dict().items()}
    (tmp_path / "old.safetensors").write_bytes(tensors.encode_tensors(old))
    with pytest.raises(ModelError, match="shapes of 0 layers depend"):
        frozen_part.load_with_new_head(CNN, str(tmp_path / "old.safetensors"), 3, 0)
