"""Training of any network of the registry with torch: the only training loop.

A method changes it through `fedquilt.core.Hooks`, never copies it. A mini-batch whose activations exceed
the budget is split into micro-batches whose gradients are added up: the same step to float tolerance.
With trained batch normalisation the mini-batch stays whole, and activations are computed again instead
(`torch_recompute`): the same bits under any budget. A mini-batch of one example, where a channel has a single value,
is normalised by the running statistics. Equal input, generator, threads and budget give equal bits.

On a processor, networks of small convolutions are laid out channels last (`WIDE`). `Fit.mixed` asks a GPU for that and
for 16-bit arithmetic: bfloat16 where the GPU computes in it, else float16 with a scaled loss, which skips a step whose
gradients overflow; on a CPU it has no effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

# OpenMP reads this once, when torch loads. By default its threads wait by spinning, which on a board with
# other work starves both: 250 steps of a small network took 6 s with it, over 60 s without.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from torch import nn

from fedquilt import footprint, metrics
from fedquilt.core import DataError, EvaluationSums, Examples, Fit, Hooks, ModelError, Tensors
from fedquilt.core.errors import first_line
from fedquilt.edge_agent.engines import gpu, objectives, torch_objectives, torch_recompute, torch_step, training
from fedquilt.models import fisher
from fedquilt.models.networks import registry, tensor_register

EVALUATED_AT_ONCE = {"cpu": 64, "cuda": 256}  # by device: more is no faster on a processor, and holds more memory
# Weights of one convolution from which on a processor is slower with channels last. Convolutions of 3x3 weights take
# 0.85 to 0.97 of the time up to 128 channels, 1.0 to 1.3 times with 256 and 1.3 to 1.5 times with 512; of 1x1 weights
# half the time, and max pooling a ninth (x86-64, one core, forward and backward). Grouped ones are a tenth faster, and
# take 10 MB more in MobileNetV3-small.
WIDE = 1 << 19
READ_AT_ONCE = {"cpu": 1, "cuda": 32}  # steps whose losses are read together: on a GPU, each reading waits for its work
# Resident after the import, on x86-64: torch 2.13 for the CPU, 2.15 with its CUDA libraries.
BASE_BYTES = 230_000_000 if torch.version.cuda is None else 525_000_000


class Probe(NamedTuple):
    """Cost of an example in a network, and the network's number of outputs."""

    trained: footprint.Trained
    library: str
    outputs: int

    def room(self, room_bytes: int, *, anchors: int = 0, moving: int = 0) -> int:
        """Bytes for activations, beside the weights, anchors, and `moving` copies of what is trained."""
        held = self.trained
        moving_bytes = moving * (held.weights_bytes - held.still_bytes)
        copies = footprint.COPIES + anchors
        return room_bytes - footprint.fixed_bytes(
            held.weights_bytes,
            held.convolutions,
            moving_bytes,
            copies=copies,
            library=self.library,
            kinds=held.kinds,
        )

    @property
    def example_bytes(self) -> int:
        """Activations of one example in training, in bytes."""
        return footprint.example_bytes(self.trained)


class TorchEngine:
    """A `fedquilt.core.Trainer`. Runs on the GPU where torch finds one.

    Args:
        budget_bytes: most that this process may hold resident.
        base_bytes: resident size before any training.
        half: 16-bit type for `Fit.mixed`; None: the one this machine is fast in.
    """

    name = "torch"

    def __init__(self, budget_bytes: int, *, base_bytes: int = BASE_BYTES, half: torch.dtype | None = None) -> None:
        self.planned_bytes: int | None = None
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.gpu = gpu.TorchMemory(torch.cuda) if self._device.type == "cuda" else None
        self.note = ""  # what its owner should know, once
        if self.gpu is None and torch.version.cuda is not None:
            self.note = f"torch is made for CUDA {torch.version.cuda} and finds no GPU here: it runs on the processor"
        self.runs_on = "CUDA" if self.gpu else "processor" if torch.version.cuda is not None else ""
        base_bytes += gpu.CONTEXT_BYTES if self.gpu else 0
        self._room_bytes = int((budget_bytes - base_bytes) / footprint.MARGIN) - footprint.FIRST_USE_BYTES["torch"]
        self._half = half or _half(self._device)
        # a process limited to some cores must not start a thread for each of the board's
        torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))

    def close(self) -> None:
        """Return cached memory of a GPU; nothing else is held between calls."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def train(
        self,
        network: Mapping[str, Any],
        start: Tensors,
        examples: Examples,
        fit: Fit,
        rng: np.random.Generator,
        *,
        hooks: Hooks = Hooks(),
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> tuple[Tensors, dict[str, float]]:
        """See `fedquilt.core.Trainer`."""
        steps = training.Steps(len(examples), fit, progress)
        orders = training.orders(len(examples), fit.epochs, rng)
        half = self._half if fit.mixed else None
        with _repeatable(int(rng.integers(2**53))):
            model, probe = self._build_model(network, start, examples, hooks, half)
            model.train()
            torch_step.freeze_statistics(model, hooks)
            torch_recompute.settle(model)
            anchors = torch_step.anchor_tensors(model, hooks)
            moments = 2 if fit.optimizer == "adam" else int(fit.momentum > 0)
            room_bytes = probe.room(self._room_bytes, anchors=len(anchors), moving=1 + moments)
            at_once = training.fitting(room_bytes, probe.example_bytes, fit.batch)
            if torch_recompute.coupled(model):
                at_once = min(fit.batch, len(examples))
            piece_bytes = footprint.piece_bytes(probe.trained, at_once, room_bytes)
            if piece_bytes is not None:
                torch_recompute.return_memory()
            kept: dict[str, Any] = {"anchors": len(anchors), "moments": moments, "piece_bytes": piece_bytes}
            planned = footprint.training_bytes(probe.trained, at_once, **kept, library=probe.library)
            self.planned_bytes = footprint.FIRST_USE_BYTES["torch"] + planned
            task = metrics.task_of(network)
            steppers = [torch_step.Stepper(model, step, fit, hooks, anchors, half, task) for step in hooks.steps]
            told: list[tuple[list[torch.Tensor], int]] = []  # losses of steps that are not read yet
            for order in orders:
                for batch in training.batches(order, fit.batch):
                    for stepper in steppers:
                        parts = training.micro_batches(batch, at_once)
                        given = (self._batch(network, examples, part, hooks) for part in parts)
                        losses = stepper.step(given, len(batch), piece_bytes)
                    told.append((losses, len(batch)))
                    if len(told) >= READ_AT_ONCE[self._device.type]:
                        _read(told, steps)
            _read(told, steps)
            return _arrays_of(model), steps.metrics()

    def evaluate(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, hooks: Hooks = Hooks()
    ) -> EvaluationSums:
        """See `fedquilt.core.Trainer`."""
        if not len(examples):
            return EvaluationSums(examples=0, task=metrics.task_of(network))
        task = metrics.task_of(network)
        found = objectives.Evaluation(task)
        with _repeatable(0):
            module, probe = self._build_model(network, model, examples, hooks)
            module.eval()
            at_once = training.fitting(
                probe.room(self._room_bytes), probe.example_bytes, EVALUATED_AT_ONCE[self._device.type]
            )
            with torch.inference_mode():
                for rows in training.batches(np.arange(len(examples)), at_once):
                    x, y = self._batch(network, examples, rows, hooks)
                    scores = module(x)
                    loss = float(torch_objectives.total(task, scores, y))
                    found.add(scores.cpu().numpy(), examples.y[rows], loss)
        return found.sums()

    def fisher(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, each: int = 1, hooks: Hooks = Hooks()
    ) -> Tensors:
        """See `fedquilt.core.Trainer`."""
        training.require_examples(examples, each)
        with _repeatable(0):
            module, probe = self._build_model(network, model, examples, hooks)
            module = module.eval().to(memory_format=torch.contiguous_format)  # as `vmap` wants batch normalisation
            room = probe.room(self._room_bytes, moving=1)
            # a group needs one gradient of all weights, and its examples' activations
            group = probe.trained.weights_bytes + each * probe.example_bytes
            groups = training.fitting(room, group, fisher.TOGETHER)
            rows = training.batches(np.arange(len(examples)), groups * each)
            parts = (self._batch(network, examples, some, hooks) for some in rows)
            loss = partial(torch_objectives.total, metrics.task_of(network))
            found = fisher.fisher_diagonal(module, parts, each, lambda scores, y: loss(scores, y) / len(y))
        return {name: value.cpu().numpy() for name, value in found.items()}

    def _build_model(
        self,
        network: Mapping[str, Any],
        start: Tensors,
        examples: Examples,
        hooks: Hooks,
        half: torch.dtype | None = None,
    ) -> tuple[nn.Module, Probe]:
        """Return the network with these tensors and hooks, and the cost of an example in it."""
        model = registry.build(network)
        model = hooks.prepare(model) if hooks.prepare else model
        model = model.to(self._device, memory_format=self._layout(model, half))  # before the probe compiles its kernels
        held = tensor_register.state_without_aliases(model)
        start = {name: start[name] for name in start if name in held or name not in model.state_dict()}
        training.require_fit(start, {name: tuple(value.shape) for name, value in held.items()})
        torch_step.free(model, hooks)
        probe = self._probe(model, network, examples, hooks)
        objectives.require_targets(examples, probe.outputs, metrics.task_of(network))
        with torch.no_grad():  # after the probe, which changes the statistics of batch normalisation
            for name, value in held.items():
                value.copy_(torch.tensor(start[name]))
        return model, probe

    def _layout(self, model: nn.Module, half: torch.dtype | None) -> torch.memory_format:
        """Layout of the network's convolutions and pictures: the one that is faster and takes no more memory."""
        pictured = [each for each in model.modules() if isinstance(each, nn.Conv2d | nn.ConvTranspose2d)]
        small = all(each.weight is None or each.weight.numel() < WIDE for each in pictured)  # None: not in this part
        plain = all(each.groups == 1 for each in pictured)
        last = half is not None or (self._device.type == "cpu" and small and plain)
        return torch.channels_last if last else torch.contiguous_format

    def _probe(self, model: nn.Module, network: Mapping[str, Any], examples: Examples, hooks: Hooks) -> Probe:
        """Run two examples, as batch normalisation takes no fewer, and measure what the backward pass would need."""
        x, _ = self._batch(network, examples, np.array([0, len(examples) - 1]), hooks)
        try:
            trained, scores = footprint.weigh(model, x)
        except RuntimeError as error:
            raise DataError(
                f"network {network.get('name')!r} takes no examples of shape {tuple(x.shape[1:])} "
                f'({first_line(error)}): give it an "input" table'
            ) from None
        if not isinstance(scores, torch.Tensor) or scores.ndim != 2:
            given = f" but {tuple(scores.shape[1:])}" if isinstance(scores, torch.Tensor) else ""
            raise ModelError(
                f"network {network.get('name')!r} does not give one number per class or output{given}: end it in a "
                "linear layer with `classes` outputs"
            )
        return Probe(trained, str(network.get("name", "")).partition("/")[0], scores.shape[1])

    def _batch(
        self, network: Mapping[str, Any], examples: Examples, rows: np.ndarray, hooks: Hooks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets on the device; a GPU copies them while this process goes on."""
        x = torch.from_numpy(training.features(examples.x[rows], network, hooks.inputs))
        y = torch_objectives.targets(metrics.task_of(network), examples.y[rows])
        if self._device.type == "cpu":
            return x, y
        x, y = (value.pin_memory().to(self._device, non_blocking=True) for value in (x, y))
        return x, y


def _read(told: list[tuple[list[torch.Tensor], int]], steps: training.Steps) -> None:
    """Account for the steps in `told`, and empty it."""
    for losses, examples in told:
        steps.add_step(sum(map(float, losses)), examples)
    told.clear()


def _half(device: torch.device) -> torch.dtype | None:
    """16-bit type in which this machine computes faster than in 32 bits: none on a CPU."""
    if device.type != "cuda":
        return None
    ampere = torch.cuda.get_device_capability(device) >= (8, 0)  # older GPUs (Nano, TX2, Xavier) emulate bfloat16
    return torch.bfloat16 if ampere else torch.float16


def _arrays_of(model: nn.Module) -> dict[str, np.ndarray]:
    """Return a model's parameters and buffers as arrays."""
    return {
        name: value.detach().cpu().contiguous().numpy()
        for name, value in tensor_register.state_without_aliases(model).items()
    }


@contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """Reproducible bits: torch's own draws (dropout) from `seed`, and deterministic kernels where there are some."""
    before = torch.get_deterministic_debug_mode()  # `use_deterministic_algorithms` imports torch's compiler, 70 MB
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
    with torch.random.fork_rng():
        # `torch.manual_seed` keeps the stack of every call for a GPU to come, and takes a quarter of a millisecond
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
