"""The Fisher diagonal: squares of single examples' gradients, the same in both engines."""

from typing import Any

import numpy as np
import pytest

from fedquilt.core import DataError, Examples, JobError
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine, init_tensors
from fedquilt.testing.toy_networks import MLP, point_devices

AMPLE = 1 << 40


def examples(count: int = 7) -> Examples:
    some = point_devices(1)[0].train
    return Examples(some.x[:count], some.y[:count])


def by_hand(model: dict[str, np.ndarray], given: Examples) -> dict[str, np.ndarray]:
    """One gradient after the other, written out for one hidden layer."""
    total = {name: np.zeros(array.shape) for name, array in model.items()}
    for x, y in zip(given.x.astype(np.float64), given.y, strict=True):
        hidden = np.maximum(model["1.weight"] @ x + model["1.bias"], 0)
        scores = model["3.weight"] @ hidden + model["3.bias"]
        back = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        back[y] -= 1
        below = (model["3.weight"].T @ back) * (hidden > 0)
        for name, gradient in (
            ("1.weight", np.outer(below, x)),
            ("1.bias", below),
            ("3.weight", np.outer(back, hidden)),
            ("3.bias", back),
        ):
            total[name] += gradient**2
    return {name: array / len(given) for name, array in total.items()}


@pytest.fixture(params=("numpy", "torch"))
def engine(request: pytest.FixtureRequest) -> Any:
    """Either engine, with room for anything."""
    if request.param == "numpy":
        return NumpyEngine(AMPLE, base_bytes=0)
    return pytest.importorskip("fedquilt.edge_agent.engines.torch.engine").TorchEngine(AMPLE, base_bytes=0)


def test_it_is_the_mean_of_squared_gradients_of_single_examples(engine):
    """Against the gradients of a small network written out by hand."""
    model, given = init_tensors(MLP, 3), examples()
    found = engine.fisher(MLP, model, given)
    assert found.keys() == model.keys()
    for name, wanted in by_hand(model, given).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-7)


def test_a_group_s_gradients_are_averaged_before_the_square(engine):
    model, given = init_tensors(MLP, 3), examples(7)
    single = engine.fisher(MLP, model, given)
    whole = engine.fisher(MLP, model, given, examples_per_gradient=7)
    assert all((whole[name] <= single[name] + 1e-7).all() for name in model)
    parts = [Examples(given.x[:4], given.y[:4]), Examples(given.x[4:], given.y[4:])]
    apart = [engine.fisher(MLP, model, part, examples_per_gradient=4) for part in parts]
    found = engine.fisher(MLP, model, given, examples_per_gradient=4)
    for name in model:
        np.testing.assert_allclose(found[name], (apart[0][name] + apart[1][name]) / 2, rtol=1e-4, atol=1e-8)


def test_little_room_changes_nothing_but_how_many_go_at_once():
    module = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine")
    model, given = init_tensors(MLP, 3), examples()
    wide, narrow = (module.TorchEngine(budget, base_bytes=0).fisher(MLP, model, given) for budget in (AMPLE, 1))
    for name in model:
        np.testing.assert_allclose(narrow[name], wide[name], rtol=1e-5, atol=1e-9)


def test_batch_normalisation_takes_one_example_at_a_time_by_its_running_statistics():
    """In evaluation mode: with batches' own statistics one example's gradient would depend on the others."""
    torch = pytest.importorskip("torch")
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine
    from fedquilt.models.networks import registry

    table = {"name": "residual", "channels": 1, "classes": 3, "width": 2}
    torch.manual_seed(0)
    model = {name: value.numpy().copy() for name, value in registry.build_network(table).state_dict().items()}
    x = np.random.default_rng(0).normal(size=(4, 1, 8, 8)).astype(np.float32)
    y = np.array([0, 1, 2, 0])
    engine = TorchEngine(AMPLE, base_bytes=0)
    whole = engine.fisher(table, model, Examples(x, y))
    single = [engine.fisher(table, model, Examples(x[i : i + 1], y[i : i + 1])) for i in range(4)]
    assert not any("running" in name for name in whole)
    for name, array in whole.items():
        mean = np.mean([each[name] for each in single], axis=0)
        np.testing.assert_allclose(array, mean, rtol=1e-3, atol=1e-3 * float(mean.max()))


def test_tied_weights_have_their_gradient_under_the_first_name():
    torch = pytest.importorskip("torch")
    from fedquilt.models import fisher

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).eval()
    model[1].weight = model[0].weight
    found = fisher.fisher_diagonal(model, [(torch.ones(2, 3), torch.tensor([0, 1]))])
    assert found.keys() == {"0.weight", "0.bias", "1.bias"}
    assert found["0.weight"].abs().max() > 0


def test_nothing_to_take_gradients_of_is_said(engine):
    with pytest.raises(DataError, match="no examples"):
        engine.fisher(MLP, init_tensors(MLP, 3), examples(0))
    with pytest.raises(JobError, match="0 examples per gradient"):
        engine.fisher(MLP, init_tensors(MLP, 3), examples(), examples_per_gradient=0)
