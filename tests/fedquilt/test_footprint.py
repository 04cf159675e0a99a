"""Predictions of memory, against networks small enough to count by hand."""

import gc
import subprocess
import sys
import weakref
from dataclasses import replace
from importlib.util import find_spec

import pytest

from fedquilt.costs import peak_memory
from fedquilt.costs.peak_memory import TrainingProperties
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState
from fedquilt.testing import toy_networks


def test_what_a_network_keeps_is_counted_once_and_without_its_weights():
    """Linear 6 -> 4, ReLU, linear 4 -> 3: the input (6 floats) and what ReLU puts out (4), which the next layer shares.

    Weights: 6 * 4 + 4 + 4 * 3 + 3 = 43 floats.
    """
    torch = pytest.importorskip("torch")
    nn = torch.nn
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    trained, answer = peak_memory.measure_training(model, torch.zeros(5, 6))
    sizes = {"kept_bytes": 4 * (6 + 4), "largest_kept_bytes": 4 * 6, "largest_output_bytes": 4 * 4}
    assert trained == TrainingProperties(4 * 43, 0, **sizes)
    assert tuple(answer.shape) == (5, 3)


def test_a_network_that_was_weighed_can_go():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    left = weakref.ref(model[0].weight)
    peak_memory.measure_training(model, torch.zeros(5, 6))
    del model
    gc.collect()
    assert left() is None


def test_buffers_count_as_weights_and_each_storage_once():
    torch = pytest.importorskip("torch")
    trained, _ = peak_memory.measure_training(torch.nn.BatchNorm1d(3), torch.randn(4, 3))
    assert trained.weights_bytes == 4 * 12 + 8
    assert trained.kept_bytes == (4 * 3 * 4 + 2 * 4 * 3) // 4


def test_training_takes_the_weights_copies_and_each_examples_activations():
    network = TrainingProperties(2_000_000, 0, 1_000_000, 100_000)
    assert peak_memory.training_bytes(network, 4) == 7_000_000 + 8_000_000
    more = {"anchors": 1}, {"moments": 1}, {"anchors": 1, "moments": 2}
    added = [peak_memory.training_bytes(network, 4, **each) - peak_memory.training_bytes(network, 4) for each in more]
    assert added == [2_000_000, 2_000_000, 6_000_000]


def test_what_is_held_still_has_no_gradients_and_moments():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    whole, _ = peak_memory.measure_training(model, torch.zeros(5, 6))
    model[0].requires_grad_(False)
    head, _ = peak_memory.measure_training(model, torch.zeros(5, 6))
    assert (whole.frozen_bytes, head.frozen_bytes) == (0, 4 * 28)
    assert (whole.kept_bytes, head.kept_bytes) == (4 * 10, 4 * 4)
    assert peak_memory.bytes_per_example(head) == 4 * 4 + peak_memory.WORKING_COPIES * 4 * 4
    wide = nn.Sequential(nn.Linear(6, 100), nn.Linear(100, 4), nn.Linear(4, 3))
    wide[:2].requires_grad_(False)
    passing, _ = peak_memory.measure_training(wide, torch.zeros(5, 6))
    assert (
        peak_memory.bytes_per_example(passing) == 4 * 4 + peak_memory.OUTPUT_COPIES * 4 * 100
    )  # more than ten times 4 floats
    whole, head = (replace(each, kept_bytes=0, largest_kept_bytes=0, largest_output_bytes=0) for each in (whole, head))
    for moments in (0, 2):
        less = peak_memory.training_bytes(whole, 1, moments=moments) - peak_memory.training_bytes(
            head, 1, moments=moments
        )
        assert less == (1 + moments) * 4 * 28


def test_predictions_grow_with_the_batch_by_the_same_for_each_example():
    network = TrainingProperties(10, 0, 30, 2)
    sizes = [peak_memory.training_bytes(network, n) for n in (1, 2, 8, 32)]
    assert sizes == sorted(set(sizes))
    assert sizes[3] - sizes[2] == 24 * peak_memory.bytes_per_example(network)
    assert sizes[0] == peak_memory.fixed_training_bytes(10, 0, 10) + peak_memory.bytes_per_example(network)
    scored = [peak_memory.inference_bytes(10, 5, n) for n in (1, 2, 8, 32)]
    assert scored == sorted(set(scored))
    assert scored[3] - scored[0] == 31 * 5


def test_convolutions_are_compiled_once_and_each():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3))
    assert peak_memory.measure_training(model, torch.zeros(2, 1, 8, 8))[0].convolutions == 2
    none, one, ten = (peak_memory.fixed_training_bytes(0, count) for count in (0, 1, 10))
    assert none == 0
    assert one == peak_memory.FIRST_KERNEL_BYTES + peak_memory.KERNEL_BYTES
    assert ten - one == 9 * peak_memory.KERNEL_BYTES


def test_each_unusual_operation_of_the_backward_pass_adds_its_pages():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    plain = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    assert peak_memory.measure_training(plain, torch.zeros(2, 6))[0].kinds == 0
    other = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3))
    trained, _ = peak_memory.measure_training(other, torch.zeros(2, 6))
    assert trained.kinds == 2
    less = replace(trained, kinds=0)
    assert (
        peak_memory.training_bytes(trained, 5) - peak_memory.training_bytes(less, 5)
        == 2 * peak_memory.OPERATION_KIND_BYTES
    )


def test_a_process_needs_its_engine_at_work_and_the_work():
    assert peak_memory.task_process_bytes("onnx", 5 * 10**6) == 94 * 10**6
    assert peak_memory.task_process_bytes("onnx", 5 * 10**6, base_bytes=60 * 10**6) == 97 * 10**6
    assert peak_memory.task_process_bytes("mine", 5) == 5


def test_predicting_imports_nothing_heavy():
    program = "import sys, fedquilt.costs.peak_memory; print({'torch', 'numpy', 'onnxruntime'} & sys.modules.keys())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


@pytest.mark.parametrize(("moved", "examples"), [(None, 16), ({"0.0.weight", "0.1.weight"}, 16), ({"6.weight"}, 1)])
def test_an_order_of_a_network_with_batch_norm_is_for_whole_mini_batches(moved, examples):
    pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    network = {"name": "residual", "channels": 1, "classes": 2, "input": {"channels": 1, "size": 8}}
    model = {name: value.numpy() for name, value in registry.build_network(network).state_dict().items()}
    network |= toy_networks.register_entry(network)
    table = {"batch": 16, "epochs": 1}
    moves = None if moved is None else {name: model[name] for name in moved}
    peaks = [
        local_training.training_task_spec(
            NetworkState(table, network, model, 1.0, each), {}, trained_tensors=moves
        ).work.peak_bytes
        for each in (0, 1000)
    ]
    assert peaks[1] - peaks[0] == examples * 1000


def test_what_is_held_in_pieces_is_never_less_than_one_of_them():
    network = peak_memory.TrainingProperties(
        weights_bytes=100, convolutions=0, kept_bytes=8000, largest_kept_bytes=100
    )  # ten times the widest, 1000 bytes, are at work for each example; nine times where pieces are made again
    assert peak_memory.checkpoint_bytes(network, 2, 18_000) is None
    assert peak_memory.checkpoint_bytes(network, 2, 17_999) == 16_000
    assert peak_memory.checkpoint_bytes(network, 2, 17_000) == 15_200
    assert peak_memory.checkpoint_bytes(network, 2, 2_500) == peak_memory.checkpoint_bytes(network, 2, -9) == 2_000
    whole = peak_memory.training_bytes(network, 2)
    assert whole - peak_memory.training_bytes(network, 2, piece_bytes=2_000) == 14_000 + 200
    fixed = whole - 2 * peak_memory.bytes_per_example(network)
    assert peak_memory.training_bytes(network, 2, piece_bytes=2_000) == fixed + 2 * peak_memory.least_bytes_per_example(
        network
    )


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_a_resnet18_on_small_images_fits_into_the_budget_that_boards_have_unless_told():
    import torch

    from fedquilt.coordinator.settings import FleetSettings
    from fedquilt.edge_agent.settings import parse_size
    from fedquilt.edge_agent.task import memory_budget
    from fedquilt.models.networks import registry

    network = {"name": "torchvision/resnet18", "classes": 10, "input": {"channels": 3, "size": 32}}
    model = registry.build_network(network)
    network |= toy_networks.register_entry(network)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    trained, _ = peak_memory.measure_training(model, torch.zeros(2, 3, 32, 32))
    state = NetworkState(
        {"batch": 32, "epochs": 1}, network, weights, 1.0, peak_memory.least_bytes_per_example(trained)
    )
    (default,) = FleetSettings().budgets
    assert (
        memory_budget.memory_shortage("torch", local_training.training_work(state), parse_size(default), None, {})
        is None
    )
