"""The training engines: which there are, learning that happens, progress, what they refuse."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from engine_cases import AMPLE, CNN, LINEAR, MLP, TIGHT, both, pictures, same_bits, table, torch_one, torch_start

from fedquilt.arrays import tensors
from fedquilt.core import DataError, Examples, Fit, JobError, ModelError, UpdateError
from fedquilt.core.evaluation import compute_metrics
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.engines import numpy_engine as numpy_engine
from fedquilt.edge_agent.engines import training


# -- making them ----------------------------------------------------------------------------------
def test_engines_are_made_by_name():
    for name in engines.available_engines():
        engine = engines.create_engine(name, AMPLE)
        assert engine.name == name
        engine.close()


def test_an_unknown_engine_lists_those_there_are():
    with pytest.raises(JobError, match=r"'tensorflow' is unknown; there are: numpy, onnx, torch"):
        engines.create_engine("tensorflow", AMPLE)


def test_asking_what_is_available_imports_nothing_heavy():
    check = """
import sys
from fedquilt.core import JobError
from fedquilt.edge_agent import engines
assert "numpy" in engines.available_engines()
assert not {"numpy", "torch", "onnxruntime"} & set(sys.modules)
sys.path[:] = []  # now nothing further is installed
assert engines.available_engines() == ()
try:
    engines.create_engine("torch", 1)
except JobError as error:
    assert str(error) == "engine 'torch' needs torch, which is not installed: pip install 'fedquilt[train]'", error
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- learning -------------------------------------------------------------------------------------
@both
def test_learning_happens(engine):
    """300 separable examples, 100 others to be told: from about a third right to above 95 %."""
    network = {**MLP, "hidden": [16]}
    start, train, held = numpy_engine.init_tensors(network, 0), table(300), table(100, seed=1)
    one = engine(AMPLE)
    before = compute_metrics(one.evaluate(network, start, held))
    model, metrics = one.train(
        network, start, train, Fit(epochs=15, batch=16, lr=0.1, momentum=0.9), tensors.seeded_rng(0)
    )
    found = one.evaluate(network, model, held)
    after = compute_metrics(found)
    assert before["accuracy"] < 0.6
    assert after["accuracy"] > 0.95
    assert found.examples == 100
    assert metrics["loss"] < 0.2 < before["loss"]
    assert metrics["steps"] == 15 * np.ceil(300 / 16)


def test_a_convolutional_network_learns_from_images():
    start, examples = torch_start(CNN), pictures()
    kept = {name: array.copy() for name, array in start.items()}
    engine = torch_one(TIGHT)
    model, _ = engine.train(CNN, start, examples, Fit(epochs=5, batch=6, lr=0.2), tensors.seeded_rng(0))
    assert compute_metrics(engine.evaluate(CNN, model, examples))["accuracy"] == 1.0
    assert same_bits(start, kept)


def test_counters_of_batch_norm_stay_integers():
    network = {"name": "resnet20-cifar", "input": {"channels": 3, "size": 8}}
    start = torch_start(network)
    model, _ = torch_one(AMPLE).train(network, start, pictures(8), Fit(batch=4), tensors.seeded_rng(0))
    counters = {name: array for name, array in model.items() if name.endswith("num_batches_tracked")}
    assert {int(array) for array in counters.values()} == {2}
    assert {array.dtype.kind for array in counters.values()} == {"i"}
    assert model.keys() == start.keys()


# -- progress and refusals ------------------------------------------------------------------------
@both
def test_progress_runs_to_one_and_may_cancel(engine):
    told: list[float] = []
    fit, start = Fit(batch=1), numpy_engine.init_tensors(MLP, 0)
    engine(AMPLE).train(MLP, start, table(4), fit, tensors.seeded_rng(0), progress=told.append)
    assert told == [0.25, 0.5, 0.75, 1.0]

    def cancel(fraction: float) -> None:
        raise InterruptedError(fraction)

    with pytest.raises(InterruptedError, match=r"0\.25"):
        engine(AMPLE).train(MLP, start, table(4), fit, tensors.seeded_rng(0), progress=cancel)


@both
def test_a_loss_that_is_not_finite_is_refused(engine):
    start = numpy_engine.init_tensors(MLP, 0)
    with pytest.raises(UpdateError, match=r"the loss became (NaN|infinite) at step \d+ of 50, learning rate 1e\+30"):
        engine(AMPLE).train(MLP, start, table(10), Fit(epochs=5, batch=1, lr=1e30), tensors.seeded_rng(0))
    broken = {**start, "1.bias": np.full(5, np.nan, np.float32)}
    with pytest.raises(UpdateError, match="the loss became NaN at step 1 of 1"):
        engine(AMPLE).train(MLP, broken, table(), Fit(), tensors.seeded_rng(0))
    with pytest.raises(UpdateError, match="of the model on 20 held-out examples is nan"):
        engine(AMPLE).evaluate(MLP, broken, table())


@both
def test_a_training_that_explodes_is_refused(engine):
    start = numpy_engine.init_tensors(LINEAR, 0)
    draws = tensors.seeded_rng("noise")
    noise = Examples(draws.normal(size=(40, 2)).astype(np.float32), draws.integers(0, 2, 40))
    with pytest.raises(UpdateError, match=r"the loss rose from 0\.\d+ to \S+ by step 10 of 20, learning rate 10000"):
        engine(AMPLE).train(LINEAR, start, noise, Fit(lr=1e4, batch=2), tensors.seeded_rng(0))


def test_one_odd_step_is_no_explosion():
    """A single loss of 50 among tenths passes, as does a bad beginning; a mean above ten times the first does not."""
    told: list[float] = []
    steps = training.TrainingProgress(20, Fit(batch=1, epochs=2), told.append)
    for loss in [0.1] * 5 + [50.0] + [0.1] * 14:
        steps.add_step(loss, 1)
    assert steps.metrics() == {"loss": pytest.approx((50 + 1.9) / 20), "steps": 20.0}
    assert told[-1] == 0.5
    bad = training.TrainingProgress(3, Fit(batch=1), told.append)
    for loss in (30.0, 200.0, 250.0):  # at most 300
        bad.add_step(loss, 1)
    worse = training.TrainingProgress(3, Fit(batch=1), told.append)
    worse.add_step(0.5, 1)  # at most 10
    worse.add_step(15.0, 1)
    with pytest.raises(UpdateError, match=r"the loss rose from 0\.5 to 10\.2 by step 3 of 3"):
        worse.add_step(15.1, 1)  # the epoch is over


@both
def test_tensors_of_another_network_are_refused(engine):
    start = numpy_engine.init_tensors(MLP, 0)
    fewer = {name: array for name, array in start.items() if name != "3.bias"}
    with pytest.raises(ModelError, match=r"'3.bias' is missing"):
        engine(AMPLE).train(MLP, fewer, table(), Fit(), tensors.seeded_rng(0))
    wider = {**start, "3.bias": np.zeros(9, np.float32)}
    with pytest.raises(ModelError, match=r"'3.bias' has shape \(9,\), the network expects \(4,\)"):
        engine(AMPLE).evaluate(MLP, wider, table())


@both
def test_examples_that_do_not_fit_are_refused(engine):
    start, good = numpy_engine.init_tensors(MLP, 0), table()
    for odd in (3, -1):
        y = good.y.copy()
        y[7] = odd
        with pytest.raises(DataError, match=r"labels run from .* 3 classes \(0 to 2\)"):
            engine(AMPLE).train(MLP, start, Examples(good.x, y), Fit(), tensors.seeded_rng(0))
    with pytest.raises(DataError, match="examples"):
        engine(AMPLE).train(MLP, start, Examples(good.x[:, :4], good.y), Fit(), tensors.seeded_rng(0))
    with pytest.raises(DataError, match="no examples"):
        engine(AMPLE).train(MLP, start, Examples(good.x[:0], good.y[:0]), Fit(), tensors.seeded_rng(0))
    assert engine(AMPLE).evaluate(MLP, start, Examples(good.x[:0], good.y[:0])).examples == 0


def test_the_numpy_engine_says_what_it_cannot_train():
    with pytest.raises(ModelError, match=r"network 'cnn', only 'mlp': pip install 'fedquilt\[train\]'"):
        numpy_engine.init_tensors(CNN, 0)
    with pytest.raises(ModelError, match=r"network 'mlp': key 'inputs' is missing"):
        numpy_engine.init_tensors({"name": "mlp", "classes": 3}, 0)
    with pytest.raises(ModelError, match="must be 1 or more"):
        numpy_engine.init_tensors({**MLP, "hidden": [5, 0]}, 0)


# -- what goes through at once --------------------------------------------------------------------
def test_what_does_not_fit_is_halved_until_it_does():
    """Room for 300 of 10 bytes each is 30 examples: 128, 64, 32 are too many, 16 fit; never fewer than 1."""
    assert training.fitting_batch_size(300, 10, 128) == 16
    assert training.fitting_batch_size(300, 10, 30) == 30
    assert training.fitting_batch_size(-5, 10, 128) == 1


def test_micro_batches_are_of_about_one_size():
    """33 examples at most 32 at once are 17 and 16, not 32 and a lonely one."""
    parts = training.micro_batches(np.arange(33), 32)
    assert [len(part) for part in parts] == [17, 16]
    assert np.concatenate(parts).tolist() == list(range(33))
