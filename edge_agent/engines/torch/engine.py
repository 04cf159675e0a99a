"""Training of any network of the registry with torch, in one loop for all methods.

A method changes the loop through `fedquilt.core.Hooks`. If the activations of a mini-batch exceed the budget, the batch
is split into micro-batches whose gradients are added: the same step to float tolerance. With trained batch
normalisation the mini-batch stays whole and activations are recomputed instead (`recomputation`): bit-identical under
any budget. A mini-batch of one example, with a single value per channel, is normalised by the running statistics. Equal
input, generator, threads and budget give bit-identical results.

On a CPU, networks of small convolutions use channels-last layout (`MAX_CHANNELS_LAST_WEIGHTS`). `Fit.mixed` selects
this layout and 16-bit arithmetic on a GPU: bfloat16 where the GPU supports it, else float16 with a scaled loss, which
skips steps whose gradients overflow. `Fit.mixed` has no effect on a CPU.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import nn

from fedquilt import metrics, models
from fedquilt.core import DataError, EvaluationSums, Examples, Fit, Hooks, ModelError, Tensors
from fedquilt.core.errors import first_line
from fedquilt.costs import peak_memory
from fedquilt.edge_agent.engines import evaluation_sums, failures, training
from fedquilt.edge_agent.engines.torch import augmentation, recomputation, training_step
from fedquilt.formats import training_choices
from fedquilt.models import fisher
from fedquilt.models.networks import registry, traces

# OpenMP reads this once, when torch loads. By default its threads wait by spinning, which on a board with
# other work starves both: 250 steps of a small network took 6 s with it, over 60 s without.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


P = TypeVar("P")
T = TypeVar("T")

EVALUATION_BATCH = {"cpu": 64, "cuda": 256}  # by device type: more is no faster on a CPU, and takes more memory
# Number of weights of a convolution from which a CPU is slower with channels last. Convolutions of 3x3 weights take
# 0.85 to 0.97 of the time up to 128 channels, 1.0 to 1.3 times with 256 and 1.3 to 1.5 times with 512. Those of 1x1
# weights take half the time, and max pooling a ninth (x86-64, one core, forward and backward). Grouped convolutions are
# a tenth faster, and take 10 MB more in MobileNetV3-small.
MAX_CHANNELS_LAST_WEIGHTS = 1 << 19
READ_INTERVAL = {"cpu": 1, "cuda": 32}  # losses read together, because each reading waits for the GPU
BATCHES_AHEAD = {"cpu": 0, "cuda": 2}  # batches that a thread prepares while the CPU launches the GPU's work
# Resident size after the import, on x86-64: torch 2.13 for the CPU, 2.15 with its CUDA libraries.
BASE_BYTES = 230_000_000 if torch.version.cuda is None else 525_000_000
# Memory of the driver's context and of loaded libraries that plans assume. The context's part is not measured. On an
# H100 (torch 2.11 for CUDA 13), a first training took 575 to 640 MB more than a second one in the same process. These
# include the task's own kernels (GPU_KERNELS_BYTES).
GPU_BYTES = (200 + 640) * 10**6
# Network whose training loads the GPU's libraries: convolutions of several widths, strides and kernels.
WARM_UP, WARM_UP_EXAMPLES = models.residual(3, 32, 10, mean=(0.5,), std=(0.25,)), 32


class TorchMemory:
    """Memory of this process on torch's first GPU. The constructor creates the driver's context.

    The kernel does not count GPU memory as resident, not even the memory that a Jetson's GPU shares with the processor.
    A task's budget is for the sum of both. torch's limit applies to torch's own allocator only. Under a lower limit,
    cuDNN chooses algorithms with less workspace. The driver's context and the libraries use further memory. It can be
    measured only where GPU and processor share memory, as the decrease of `available_bytes`. Kernels for the shapes of
    a task are loaded later, into resident memory, for which plans reserve `peak_memory.GPU_KERNELS_BYTES`.

    Args:
        cuda: The module `torch.cuda`.
        load_libraries: Function that loads the libraries of trainings, so that the first task's peak is without them.
        available_bytes: Function that returns the board's available memory plus this process's own.
    """

    def __init__(
        self, cuda: Any, load_libraries: Callable[[], None], available_bytes: Callable[[], int] | None = None
    ) -> None:
        self._cuda, available_bytes = cuda, available_bytes or _available_or_own_bytes
        available_before = available_bytes()
        cuda.init()
        load_libraries()
        cuda.synchronize()
        library_bytes = max(available_before - available_bytes() - int(cuda.memory_reserved(0)), 0)
        device = cuda.get_device_properties(0)
        self._total_bytes = int(device.total_memory)
        self._context_bytes = library_bytes if device.is_integrated else 0

    def begin(self, budget_bytes: int) -> int:
        """Release cached memory, reset the peak and limit torch's allocator. Return the GPU memory in use."""
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(0)
        share = (budget_bytes - self._context_bytes - peak_memory.GPU_KERNELS_BYTES) / self._total_bytes
        self._cuda.set_per_process_memory_fraction(min(max(share, 0.0), 1.0), 0)
        return self._context_bytes + int(self._cuda.memory_reserved(0))

    def peak_bytes(self) -> int:
        return self._context_bytes + int(self._cuda.max_memory_reserved(0))


class TorchEngine:
    """Trainer on torch, as in `fedquilt.core.Trainer`, on the GPU if torch finds one."""

    name = "torch"
    gpu: TorchMemory | None = None  # set when an engine of this process has found a GPU
    _is_missing_gpu_noted = False  # a process may have an engine for each of many simulated devices

    def __init__(
        self, budget_bytes: int, *, base_bytes: int = BASE_BYTES, half_dtype: torch.dtype | None = None
    ) -> None:
        self.planned_bytes: int | None = None
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self._device.type == "cuda"
        self.note = ""  # message for the device's owner
        if not on_gpu and torch.version.cuda is not None and not TorchEngine._is_missing_gpu_noted:
            TorchEngine._is_missing_gpu_noted = True
            self.note = (
                f"torch for CUDA {torch.version.cuda} finds no GPU on this device: training runs on the processor"
            )
        self.runs_on = "CUDA" if on_gpu else "processor" if torch.version.cuda is not None else ""
        base_bytes += GPU_BYTES if on_gpu else 0
        self._room_bytes = (
            int((budget_bytes - base_bytes) / peak_memory.PREDICTION_MARGIN) - peak_memory.FIRST_USE_BYTES["torch"]
        )
        self._first_use_bytes = peak_memory.FIRST_USE_BYTES["torch"] + (peak_memory.GPU_KERNELS_BYTES if on_gpu else 0)
        self._half_dtype = half_dtype or _fast_half_type(self._device)
        # one thread for each core that this process may use
        torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
        if on_gpu and TorchEngine.gpu is None:
            TorchEngine.gpu = TorchMemory(torch.cuda, self._load_libraries)

    def _load_libraries(self) -> None:
        """Train and evaluate a small network, so that torch loads its GPU libraries before the first task."""
        examples = Examples(np.zeros((WARM_UP_EXAMPLES, 32, 32, 3), np.uint8), np.arange(WARM_UP_EXAMPLES) % 10)
        start = _arrays_from_model(registry.load_network(WARM_UP))
        fit = Fit(batch=WARM_UP_EXAMPLES, lr=1e-3)
        self.train(WARM_UP, start, examples, fit, np.random.default_rng(0))
        self.evaluate(WARM_UP, start, examples)
        self.planned_bytes = None

    def close(self) -> None:
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
        steps = training.TrainingProgress(len(examples), fit, progress)
        schedule = training_choices.parse_schedule(fit.schedule)
        epoch_orders = training.draw_orders(len(examples), fit.epochs, rng)
        half_dtype = self._half_dtype if fit.mixed else None
        seed = int(rng.integers(2**53))
        with deterministic_torch(seed):
            model, properties, outputs = self._build_model(network, start, examples, hooks, half_dtype)
            model.train()
            training_step.freeze_statistics(model, hooks)
            recomputation.handle_single_values(model)
            anchors = training_step.anchor_tensors(model, hooks)
            copies: dict[str, Any] = {
                "anchors": len(anchors),
                "moments": peak_memory.optimizer_copies(vars(fit)) + bool(fit.ema),
                "library": _library(network),
            }
            imported_bytes = peak_memory.imported_bytes(vars(fit), _library(network))
            room_bytes = self._room_bytes - imported_bytes - peak_memory.training_bytes(properties, 0, **copies)
            micro_batch_size = training.fitting_batch_size(
                room_bytes, peak_memory.bytes_per_example(properties), fit.batch
            )
            if recomputation.has_coupled_examples(model):
                micro_batch_size = min(fit.batch, len(examples))
            micro_batch_size = min(micro_batch_size, math.ceil(fit.batch / fit.accumulate))
            piece_bytes = peak_memory.checkpoint_bytes(properties, micro_batch_size, room_bytes)
            if piece_bytes is not None:
                recomputation.return_freed_memory()
            training_bytes = peak_memory.training_bytes(properties, micro_batch_size, **copies, piece_bytes=piece_bytes)
            self.planned_bytes = self._first_use_bytes + imported_bytes + training_bytes
            loss = training_step.TrainingLoss(fit.loss, metrics.task_from_network(network), outputs, self._device)
            average = training_step.WeightAverage(model, fit.ema)
            steppers = [
                training_step.Stepper(model, step, fit, hooks, anchors, half_dtype, loss.total) for step in hooks.steps
            ]
            unread_losses: list[tuple[list[torch.Tensor], int]] = []  # losses that are not read yet
            batches = [batch for epoch_order in epoch_orders for batch in training.mini_batches(epoch_order, fit.batch)]
            passes = enumerate(batch for batch in batches for _ in steppers)
            parts = (
                part for number, batch in passes for part in augmentation.divide_batch(batch, micro_batch_size, number)
            )
            augmented = augmentation.Augmentation(fit.augment, seed)
            load = partial(self._load_part, network, examples, hooks, augmented)
            # transforms draw from torch's generator, which belongs to one thread
            loaded = _map_ahead(load, parts, 0 if fit.augment else BATCHES_AHEAD[self._device.type])
            for number, batch in enumerate(batches):
                factor = schedule.step_factor(fit.round, number, len(batches))
                divisor = loss.divisor(examples.y[batch])
                for stepper in steppers:
                    micro_batches = itertools.islice(loaded, len(training.micro_batches(batch, micro_batch_size)))
                    losses = stepper.step(micro_batches, len(batch), piece_bytes, divisor=divisor, factor=factor)
                average.add_step()
                unread_losses.append((losses, len(batch)))
                if len(unread_losses) >= READ_INTERVAL[self._device.type]:
                    _record_steps(unread_losses, steps)
            _record_steps(unread_losses, steps)
            average.load_into_model()
            return _arrays_from_model(model), steps.metrics()

    def evaluate(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, hooks: Hooks = Hooks()
    ) -> EvaluationSums:
        task = metrics.task_from_network(network)
        if not len(examples):
            return EvaluationSums(examples=0, task=task)
        accumulator = evaluation_sums.EvaluationAccumulator(task, examples.prior)
        with deterministic_torch(0):
            module, properties, _ = self._build_model(network, model, examples, hooks)
            module.eval()
            fixed = peak_memory.evaluation_bytes(properties, 0, library=_library(network))
            batch_size = training.fitting_batch_size(
                self._room_bytes - fixed, peak_memory.bytes_per_example(properties), EVALUATION_BATCH[self._device.type]
            )
            batches = list(training.mini_batches(np.arange(len(examples)), batch_size))
            unread_scores: list[tuple[np.ndarray, torch.Tensor, torch.Tensor]] = []
            with torch.inference_mode():
                for rows, (x, y) in zip(batches, self._load_batches(network, examples, batches, hooks), strict=True):
                    scores = module(x)
                    unread_scores.append((examples.y[rows], scores, training_step.total_loss(task, scores, y)))
                    if len(unread_scores) >= READ_INTERVAL[self._device.type]:
                        _record_scores(unread_scores, accumulator)
                _record_scores(unread_scores, accumulator)
        return accumulator.sums()

    def fisher(
        self,
        network: Mapping[str, Any],
        model: Tensors,
        examples: Examples,
        *,
        examples_per_gradient: int = 1,
        hooks: Hooks = Hooks(),
    ) -> Tensors:
        training.require_examples(examples, examples_per_gradient)
        with deterministic_torch(0):
            module, properties, _ = self._build_model(network, model, examples, hooks)
            module = module.eval().to(
                memory_format=torch.contiguous_format
            )  # `vmap` requires this of batch normalisation
            room = self._room_bytes - peak_memory.training_bytes(properties, 0, library=_library(network))
            # a group needs one gradient of all weights, and its examples' activations
            group = properties.weights_bytes + examples_per_gradient * peak_memory.bytes_per_example(properties)
            groups = training.fitting_batch_size(room, group, fisher.MAX_GRADIENTS)
            rows = training.mini_batches(np.arange(len(examples)), groups * examples_per_gradient)
            parts = self._load_batches(network, examples, rows, hooks)
            loss = partial(training_step.total_loss, metrics.task_from_network(network))
            diagonal = fisher.fisher_diagonal(
                module, parts, examples_per_gradient, lambda scores, y: loss(scores, y) / len(y)
            )
        return {name: value.cpu().numpy() for name, value in diagonal.items()}

    def _build_model(
        self,
        network: Mapping[str, Any],
        start: Tensors,
        examples: Examples,
        hooks: Hooks,
        half_dtype: torch.dtype | None = None,
    ) -> tuple[nn.Module, peak_memory.TrainingProperties, int]:
        """Return the network with the tensors of `start`, its measured properties and its number of outputs."""
        model = registry.build_network(network)
        model = hooks.prepare(model) if hooks.prepare else model
        # The format must be set before the probe compiles kernels.
        model = model.to(self._device, memory_format=self._memory_format(model, half_dtype))
        model_state = traces.state_without_aliases(model)
        start = {name: start[name] for name in start if name in model_state or name not in model.state_dict()}
        training.require_shapes(start, {name: tuple(value.shape) for name, value in model_state.items()})
        training_step.enable_gradients(model, hooks)
        properties, outputs = self._probe_network(model, network, examples, hooks)
        evaluation_sums.require_targets(examples, outputs, metrics.task_from_network(network))
        with torch.no_grad():  # after the probe, which changes the statistics of batch normalisation
            for name, value in model_state.items():
                value.copy_(torch.tensor(start[name]))
        return model, properties, outputs

    def _memory_format(self, model: nn.Module, half_dtype: torch.dtype | None) -> torch.memory_format:
        convolutions = [
            convolution for convolution in model.modules() if isinstance(convolution, nn.Conv2d | nn.ConvTranspose2d)
        ]
        # In partial networks the weights of other parts are None.
        are_small = all(
            convolution.weight is None or convolution.weight.numel() < MAX_CHANNELS_LAST_WEIGHTS
            for convolution in convolutions
        )
        are_ungrouped = all(convolution.groups == 1 for convolution in convolutions)
        use_channels_last = half_dtype is not None or (self._device.type == "cpu" and are_small and are_ungrouped)
        return torch.channels_last if use_channels_last else torch.contiguous_format

    def _probe_network(
        self, model: nn.Module, network: Mapping[str, Any], examples: Examples, hooks: Hooks
    ) -> tuple[peak_memory.TrainingProperties, int]:
        # Batch normalisation requires at least two examples.
        x, _ = self._load_batch(network, examples, np.array([0, len(examples) - 1]), hooks)
        try:
            properties, scores = peak_memory.measure_training(model, x)
        except RuntimeError as error:
            if failures.is_out_of_memory_error(error) or failures.is_gpu_failure_text(str(error)):
                raise
            raise DataError(
                f"network {network.get('name')!r} cannot take examples of shape {tuple(x.shape[1:])} "
                f'({first_line(error)}): add an "input" table'
            ) from None
        if not isinstance(scores, torch.Tensor) or scores.ndim != 2:
            shape = tuple(scores.shape[1:]) if isinstance(scores, torch.Tensor) else type(scores).__name__
            raise ModelError(
                f"network {network.get('name')!r} returns {shape} for an example, not one number per class or output: "
                "end the network with a linear layer of `classes` outputs"
            )
        return properties, scores.shape[1]

    def _load_batches(
        self, network: Mapping[str, Any], examples: Examples, parts: Iterable[np.ndarray], hooks: Hooks
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        load = partial(self._load_batch, network, examples, hooks=hooks)
        return _map_ahead(load, parts, BATCHES_AHEAD[self._device.type])

    def _load_part(
        self,
        network: Mapping[str, Any],
        examples: Examples,
        hooks: Hooks,
        augmented: augmentation.Augmentation,
        part: augmentation.Part,
    ) -> tuple[torch.Tensor, torch.Tensor | training_step.MixedTargets]:
        def load(positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
            rows = part.batch[positions]
            x = augmented.transform_examples(examples.x[rows], part, positions)
            return self._load_batch(network, Examples(x, examples.y[rows]), np.arange(len(rows)), hooks)

        if not augmented.is_used:
            return self._load_batch(network, examples, part.batch[part.positions], hooks)
        x, y = load(part.positions)
        if (mixture := augmented.mixture_of_part(part)) is None:
            return x, y
        share, other_rows = mixture
        other_x, other_y = load(other_rows[part.positions])
        return share * x + (1 - share) * other_x, training_step.MixedTargets(y, other_y, share)

    def _load_batch(
        self, network: Mapping[str, Any], examples: Examples, rows: np.ndarray, hooks: Hooks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.from_numpy(training.network_inputs(examples.x[rows], network, hooks.inputs))
        y = training_step.targets_tensor(metrics.task_from_network(network), examples.y[rows])
        if self._device.type == "cpu":
            return x, y
        x, y = (value.pin_memory().to(self._device, non_blocking=True) for value in (x, y))
        return x, y


def _map_ahead(load: Callable[[P], T], parts: Iterable[P], max_ahead: int) -> Iterator[T]:
    """Yield `load(part)` for each part. A thread loads up to `max_ahead` parts in advance."""
    if not max_ahead:
        yield from map(load, parts)
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for part in parts:
            waiting.append(pool.submit(load, part))
            if len(waiting) > max_ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _library(network: Mapping[str, Any]) -> str:
    # "timm" of the name "timm/resnet18"
    return str(network.get("name", "")).partition("/")[0]


def _record_steps(unread_losses: list[tuple[list[torch.Tensor], int]], steps: training.TrainingProgress) -> None:
    values = iter(
        torch.stack([loss for losses, _ in unread_losses for loss in losses]).tolist() if unread_losses else []
    )
    for losses, examples in unread_losses:
        steps.add_step(sum(itertools.islice(values, len(losses))), examples)
    unread_losses.clear()


def _record_scores(
    unread_scores: list[tuple[np.ndarray, torch.Tensor, torch.Tensor]],
    accumulator: evaluation_sums.EvaluationAccumulator,
) -> None:
    for y, scores, loss in unread_scores:
        accumulator.add_batch(scores.cpu().numpy(), y, float(loss))
    unread_scores.clear()


def _available_or_own_bytes() -> int:
    process_memory = psutil.Process().memory_info()
    return int(psutil.virtual_memory().available + process_memory.rss - process_memory.shared)


def _fast_half_type(device: torch.device) -> torch.dtype | None:
    if device.type != "cuda":
        return None
    ampere = torch.cuda.get_device_capability(device) >= (8, 0)  # older GPUs (Nano, TX2, Xavier) emulate bfloat16
    return torch.bfloat16 if ampere else torch.float16


def _arrays_from_model(model: nn.Module) -> dict[str, np.ndarray]:
    return {
        name: value.detach().cpu().contiguous().numpy() for name, value in traces.state_without_aliases(model).items()
    }


@contextmanager
def deterministic_torch(seed: int) -> Iterator[None]:
    """Seed torch and use deterministic algorithms within the context. Random state and mode are restored."""
    debug_mode = torch.get_deterministic_debug_mode()  # `use_deterministic_algorithms` imports torch's compiler, 70 MB
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
    with torch.random.fork_rng():
        # `torch.manual_seed` keeps the stack of every call for a GPU to come, and takes a quarter of a millisecond
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(debug_mode)
