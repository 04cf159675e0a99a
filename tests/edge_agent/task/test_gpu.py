"""Memory of a GPU counts as the task's, and losses are read from it together. A stand-in plays torch's GPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from children import Place, child, run_request

from fedquilt.arrays import tensors
from fedquilt.core import DataError, Examples, Fit, Hooks, UpdateError
from fedquilt.costs import peak_memory
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.edge_agent.task import main

torch_engine = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine")

MB = 10**6


@dataclass
class Cuda:
    """Counts as `torch.cuda` does: 8 GB, of which an allocator has reserved some."""

    shared: bool
    reserved: int = 0
    most: int = 0
    share: float = 1.0

    def init(self) -> None: ...
    def synchronize(self) -> None: ...
    def empty_cache(self) -> None: ...

    def get_device_properties(self, number: int) -> Any:
        return SimpleNamespace(total_memory=8000 * MB, is_integrated=self.shared)

    def set_per_process_memory_fraction(self, share: float, number: int) -> None:
        self.share = share

    def reset_peak_memory_stats(self, number: int) -> None:
        self.most = self.reserved

    def memory_reserved(self, number: int) -> int:
        return self.reserved

    def max_memory_reserved(self, number: int) -> int:
        return self.most


@pytest.mark.parametrize(("shared", "context"), [(True, 150 * MB), (False, 0)])
def test_what_the_context_took_is_known_where_both_share_one_memory(shared: bool, context: int) -> None:
    """The board had 1000 MB before and 830 MB after, of which the allocator reserved 20 MB.

    A GPU with memory of its own takes none of the board's. What libraries take is part of the context.
    """
    left, order = iter([1000 * MB, 830 * MB]), []
    cuda = Cuda(shared, reserved=20 * MB)
    held = torch_engine.TorchMemory(
        cuda, lambda: order.append("libraries"), lambda: (order.append("reading"), next(left))[1]
    )
    assert order == ["reading", "libraries", "reading"]
    assert held.begin(2000 * MB) == context + 20 * MB
    # resident memory of kernels that a task's shapes need
    assert cuda.share == pytest.approx((2000 * MB - context - peak_memory.GPU_KERNELS_BYTES) / (8000 * MB))
    cuda.most = 300 * MB
    assert held.peak_bytes() == context + 300 * MB


def test_a_budget_below_the_processs_own_size_leaves_nothing_of_the_gpu() -> None:
    """A limit below 0 would be refused by torch, and the task fail with another error than that of memory."""
    cuda = Cuda(shared=False)
    torch_engine.TorchMemory(cuda, lambda: None, lambda: 0).begin(-5 * MB)
    assert cuda.share == 0.0


def test_a_gpu_whose_libraries_exceed_the_budget_is_named(place: Place) -> None:
    cuda = Cuda(shared=False, reserved=9000 * MB)

    class Bench(main.TaskExecutor):
        def load_engine(self, name: str, budget_bytes: int) -> Any:
            made = super().load_engine(name, budget_bytes)
            made.gpu = torch_engine.TorchMemory(cuda, lambda: None, lambda: 0)
            return made

    found = main.run_task(place.order(), Bench(), own_process=True)
    assert found.code == "budget"
    assert "GPU libraries takes" in found.reason
    assert "CUDA_VISIBLE_DEVICES" in found.reason


def test_the_libraries_of_a_gpu_are_those_of_a_training_and_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    one = torch_engine.TorchEngine(1 << 40)
    for name in ("train", "evaluate"):
        real = getattr(one, name)
        monkeypatch.setattr(one, name, lambda *given, _name=name, _real=real: (done.append(_name), _real(*given))[1])
    one._load_libraries()
    assert done == ["train", "evaluate"]
    assert one.planned_bytes is None


@pytest.mark.parametrize("said", ["CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: no kernel image"])
def test_a_gpu_that_fails_is_no_fault_of_the_data(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError(said)

    monkeypatch.setattr(torch_engine.peak_memory, "measure_training", fail)
    network = {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2}
    examples = Examples(np.zeros((4, 4), np.float32), np.arange(4) % 2)
    with pytest.raises(RuntimeError, match=said[:10]):
        torch_engine.TorchEngine(1 << 40).train(
            network, numpy_engine.init_tensors(network, 0), examples, Fit(batch=4), tensors.seeded_rng(1)
        )


def test_a_tasks_peak_is_what_it_held_resident_and_on_the_gpu(place: Place) -> None:
    """The same order twice: with 300 MB on a GPU, its peak and its base are so much larger."""
    cuda = Cuda(shared=False)

    class Bench(main.TaskExecutor):
        def load_engine(self, name: str, budget_bytes: int) -> Any:
            made = super().load_engine(name, budget_bytes)
            made.gpu = torch_engine.TorchMemory(cuda, lambda: None, lambda: 0)
            cuda.reserved = 40 * MB
            made.train, train = (
                lambda *given, **more: (setattr(cuda, "most", 300 * MB), train(*given, **more))[1],
                made.train,
            )
            return made

    plain = main.run_task(place.order(budget_bytes=16 << 30), main.TaskExecutor(), own_process=True)
    beside = main.run_task(place.order(budget_bytes=16 << 30), Bench(), own_process=True)
    assert (plain.code, beside.code) == ("ok", "ok")
    assert plain.base_bytes is not None and plain.peak_bytes is not None  # noqa: PT018
    assert beside.base_bytes is not None and beside.peak_bytes is not None  # noqa: PT018
    assert beside.base_bytes - plain.base_bytes == pytest.approx(40 * MB, abs=30 * MB)
    assert beside.peak_bytes - plain.peak_bytes == pytest.approx(300 * MB, abs=30 * MB)


def test_a_process_whose_gpu_failed_is_replaced(place: Place) -> None:
    with child(place.command()) as worker:
        failed = run_request(worker, place.order("astray"))
        assert (failed.code, "CUDA error: an illegal memory access" in failed.reason) == ("failed", True)
        assert worker.resident_bytes == 0  # it is gone
        assert run_request(worker, place.order()).code == "ok"
        assert worker.resident_bytes > 0  # while one whose task went well is kept


def test_losses_that_are_read_together_are_those_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """23 examples in mini-batches of 4, twice: 12 steps, read one by one and five at a time; same bits, same loss."""
    network = {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2}
    start, draws = numpy_engine.init_tensors(network, 0), np.random.default_rng(0)
    examples = Examples(draws.random((23, 4), np.float32), np.arange(23) % 2)

    def trained(lr: float = 0.1) -> Any:
        return torch_engine.TorchEngine(1 << 40).train(
            network, start, examples, Fit(epochs=2, batch=4, lr=lr), tensors.seeded_rng(1)
        )

    singly = trained()
    monkeypatch.setitem(torch_engine.READ_INTERVAL, "cpu", 5)
    together = trained()
    assert singly[1] == together[1]
    assert all(np.array_equal(singly[0][name], together[0][name]) for name in start)
    with pytest.raises(UpdateError, match="step"):
        trained(lr=1e30)


def test_an_engine_that_falls_back_is_told_of_with_the_first_update_alone(place: Place) -> None:
    class Bench(main.TaskExecutor):
        def load_engine(self, name: str, budget_bytes: int) -> Any:
            fresh = self._engine is None
            made = super().load_engine(name, budget_bytes)
            made.note = "it runs on the processor" if fresh else made.note
            return made

    bench = Bench()
    assert [main.run_task(place.order(), bench).note for _ in range(2)] == ["it runs on the processor", ""]


def test_what_is_prepared_and_read_together_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    network = {"name": "cnn", "channels": 1, "size": 16, "classes": 2, "input": {"channels": 1, "size": 16}}
    draws = np.random.default_rng(0)
    examples = Examples(draws.integers(0, 256, (200, 16, 16), np.uint8), np.arange(200) % 2)
    registry = pytest.importorskip("fedquilt.models.networks.registry")
    start = {name: value.numpy() for name, value in registry.load_network(network).state_dict().items()}

    def worked() -> tuple[Any, Any, Any]:
        one = torch_engine.TorchEngine(1 << 40)
        model, told = one.train(network, start, examples, Fit(epochs=2, batch=16), tensors.seeded_rng(1))
        return (
            (model, one.fisher(network, start, examples, examples_per_gradient=7)),
            told,
            one.evaluate(network, model, examples),
        )

    monkeypatch.setitem(torch_engine.EVALUATION_BATCH, "cpu", 16)
    singly = worked()
    monkeypatch.setitem(torch_engine.READ_INTERVAL, "cpu", 5)
    monkeypatch.setitem(torch_engine.BATCHES_AHEAD, "cpu", 2)
    together = worked()
    assert singly[1:] == together[1:]
    for one, other in zip(singly[0], together[0], strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in start if name in one)


def test_examples_that_cannot_be_prepared_fail_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    network = {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2}
    seen = []

    def inputs(x: np.ndarray) -> np.ndarray:
        seen.append(len(x))
        if len(seen) > 3:
            raise DataError("the file is damaged")
        return x

    monkeypatch.setitem(torch_engine.BATCHES_AHEAD, "cpu", 2)
    with pytest.raises(DataError, match="the file is damaged"):
        torch_engine.TorchEngine(1 << 40).train(
            network,
            numpy_engine.init_tensors(network, 0),
            Examples(np.zeros((20, 4), np.float32), np.arange(20) % 2),
            Fit(batch=4),
            tensors.seeded_rng(1),
            hooks=Hooks(inputs=inputs),
        )
