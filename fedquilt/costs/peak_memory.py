"""Predicted peak memory of training and inference, in bytes above that of an idle engine.

Engines plan with the predictions, and devices accept tasks by them. Only `measure_training` imports torch. Constants
were fitted on x86-64 (torch 2.13 for the CPU, onnxruntime 1.31, glibc 2.36). A device learns its own error while
working (`fedquilt.edge_agent.task.memory_budget`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fedquilt.console import units
from fedquilt.core import Profile, WorkEstimate

if TYPE_CHECKING:
    import torch
    from torch import nn

# Memory of a task's process after the import of its engine, measured on x86-64. Each agent measures its own.
ASSUMED_BASE_BYTES: Mapping[str, int] = {"numpy": 38 * 10**6, "onnx": 57 * 10**6, "torch": 233 * 10**6}
# Memory that an engine loads and compiles at its first use, independent of the work.
FIRST_USE_BYTES: Mapping[str, int] = {"onnx": 12 * 10**6, "torch": 18 * 10**6}
# Memory of torch's kernels for the shapes of a task on a GPU, without the kernels of every process (68 MB on an H100).
GPU_KERNELS_BYTES = 100 * 10**6
# Upper bound of freed memory that glibc keeps between the graphs of a task (`python -m tests.benches memory`).
FREED_BYTES: Mapping[str, int] = {"onnx": 20 * 10**6}


def task_process_bytes(engine: str, peak_bytes: int, base_bytes: int | None = None) -> int:
    """Return the peak memory of a task's process. Without `base_bytes`, the engine's own is estimated."""
    base = ASSUMED_BASE_BYTES.get(engine, 0) if base_bytes is None else base_bytes
    return base + FIRST_USE_BYTES.get(engine, 0) + FREED_BYTES.get(engine, 0) + peak_bytes


@dataclass(frozen=True)
class TrainingProperties:
    weights_bytes: int  # parameters and buffers
    convolutions: int  # number of convolution layers
    kept_bytes: int  # activations per example that the forward pass keeps for the backward pass
    largest_kept_bytes: int  # largest kept activation per example
    frozen_bytes: int = 0  # frozen parameters, which have no gradients and moments
    largest_output_bytes: int = 0  # largest activation per example, kept or not
    kinds: int = 0  # number of kinds of operations in the backward pass without COMMON_OPERATIONS


def measure_training(model: nn.Module, x: torch.Tensor) -> tuple[TrainingProperties, torch.Tensor]:
    """Return a network's training memory, measured with one forward pass, and the output of the pass.

    A parameter without gradient is frozen, and activations needed only by frozen parameters are not kept. The pass is
    in training mode, so it updates batch-normalisation statistics and requires two examples with batch normalisation.
    """
    import torch
    from torch import nn

    model_tensors = [*model.parameters(), *model.buffers()]
    model_storages = {value.untyped_storage().data_ptr() for value in model_tensors}
    kept_bytes: dict[int, int] = {}

    def record_storage(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in model_storages:
            kept_bytes[storage.data_ptr()] = storage.nbytes()
        return value.detach()  # returning the value would create a reference cycle that torch never frees

    largest_output = 0

    def record_output(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal largest_output
        if isinstance(output, torch.Tensor):
            largest_output = max(largest_output, output.nbytes)

    hooks = [module.register_forward_hook(record_output) for module in model.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(record_storage, lambda value: value):
            output = model.train()(x)
    finally:
        for hook in hooks:
            hook.remove()
    weights = [value.untyped_storage().nbytes() for value in model_tensors]
    properties = TrainingProperties(
        weights_bytes=sum(weights),
        convolutions=sum(isinstance(layer, nn.modules.conv._ConvNd) for layer in model.modules()),
        kept_bytes=-(-sum(kept_bytes.values()) // len(x)),
        largest_kept_bytes=-(-max(kept_bytes.values(), default=0) // len(x)),
        frozen_bytes=sum(value.untyped_storage().nbytes() for value in model.parameters() if not value.requires_grad),
        largest_output_bytes=-(-largest_output // len(x)),
        kinds=len(_backward_operations(output) - COMMON_OPERATIONS),
    )
    return properties, output


def _backward_operations(output: object) -> set[str]:
    operations: set[str] = set()
    visited, pending = set(), [getattr(output, "grad_fn", None)]
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            operations.add(node.name().rstrip("0123456789"))
            pending += [previous for previous, _ in node.next_functions]
    return operations


# Memory of the imported library of a network. Torchvision imports torch's compiler.
LIBRARY_BYTES = {"torchvision": 64_000_000}
# Memory of compiled kernels: for the first convolution, and for each convolution.
FIRST_KERNEL_BYTES, KERNEL_BYTES = 9_000_000, 500_000
# Operations of the networks that FIRST_USE_BYTES was fitted with, so FIRST_USE_BYTES includes their memory.
_COMMON_OPERATION_NAMES = "Add Addmm Cat Convolution MaxPool2DWithIndices Mean NativeBatchNorm Relu T View"
COMMON_OPERATIONS = frozenset(f"{name}Backward" for name in _COMMON_OPERATION_NAMES.split()) | {
    "torch::autograd::AccumulateGrad"
}
# Memory of each other kind of operation, independent of its size: pages of torch's libraries with its two passes.
OPERATION_KIND_BYTES = 400_000
WEIGHT_COPIES = 2
"""Copies of the weights: received weights and model. Anchors, gradients and optimizer state are additional."""
FREED_SHARE = 0.5  # freed tensors that glibc keeps, as a share of the weights
# Multiple of the largest kept activation for gradients, scratch memory, and freed memory that glibc keeps.
WORKING_COPIES = 10
# The same multiple with recomputed activations. Glibc then returns freed memory to the kernel.
RECOMPUTED_WORKING_COPIES = 9
# Multiple of the largest activation before the first trained tensor, where no activations are kept.
OUTPUT_COPIES = 4

# Copies of the trained tensors in the optimizer's state, without the momentum of sgd.
OPTIMIZER_COPIES: Mapping[str, int] = {"sgd": 0, "adam": 2, "adamw": 2}
TORCH_OPTIMIZER_COPIES = 3  # upper bound for the classes of `torch.optim`
# Imports of `torch.optim` classes (torch's compiler) and of `torchvision.transforms` (compiler and torchvision).
TORCH_OPTIMIZER_BYTES, TRANSFORMS_BYTES = 80_000_000, 92_000_000

MAX_PIECES = 8  # parts of the forward pass that are recomputed one at a time if all activations do not fit

# Upper bound of measured peak / predicted peak. Engines with a memory budget divide the budget by this margin.
PREDICTION_MARGIN = 1.1


def training_bytes(
    network: TrainingProperties,
    examples: int,
    *,
    anchors: int = 0,
    moments: int = 0,
    library: str = "",
    piece_bytes: int | None = None,
) -> int:
    """Return the peak memory of a training step, without the base memory of the torch engine.

    `examples` counts a micro-batch, `anchors` further copies of the weights, and `moments` copies of the
    trained tensors. Activations beyond `piece_bytes` are recomputed in pieces. With None, all are kept.
    """
    trained_bytes = (1 + moments) * (network.weights_bytes - network.frozen_bytes)
    copies, kinds = WEIGHT_COPIES + anchors, network.kinds
    fixed_bytes = fixed_training_bytes(
        network.weights_bytes, network.convolutions, trained_bytes, copies=copies, library=library, kinds=kinds
    )
    kept_bytes = examples * network.kept_bytes
    held_bytes = kept_bytes if piece_bytes is None else min(piece_bytes, kept_bytes)
    return fixed_bytes + examples * _working_bytes(network, is_recomputed=piece_bytes is not None) + held_bytes


def choice_name(choice: str | Mapping[str, Any]) -> str:
    return str(choice["name"] if isinstance(choice, Mapping) else choice)


def optimizer_copies(params: Mapping[str, Any]) -> int:
    """Return how many copies of the trained tensors the optimizer's state has, momentum included."""
    copies = OPTIMIZER_COPIES.get(choice_name(params.get("optimizer", "sgd")), TORCH_OPTIMIZER_COPIES)
    return copies or int(params.get("momentum", 0) > 0)


def imported_bytes(params: Mapping[str, Any], library: str = "") -> int:
    """Return the memory that importing the optimizer and transforms adds to that of `library`."""
    names = [choice_name(choice) for choice in (params.get("optimizer", "sgd"), *params.get("augment", ()))]
    is_class = [name[:1].isupper() and ":" not in name for name in names]  # whether a class of torch or torchvision
    largest = max(is_class[0] * TORCH_OPTIMIZER_BYTES, any(is_class[1:]) * TRANSFORMS_BYTES)
    return max(largest - LIBRARY_BYTES.get(library, 0), 0)


def fixed_training_bytes(
    weights_bytes: int,
    convolutions: int,
    trained_bytes: int = 0,
    *,
    copies: int = WEIGHT_COPIES,
    library: str = "",
    kinds: int = 0,
) -> int:
    """Return the part of `training_bytes` that is independent of the micro-batch."""
    kernel_bytes = FIRST_KERNEL_BYTES * min(convolutions, 1) + KERNEL_BYTES * convolutions
    total_bytes = kernel_bytes + OPERATION_KIND_BYTES * kinds
    return LIBRARY_BYTES.get(library, 0) + total_bytes + int((copies + FREED_SHARE) * weights_bytes) + trained_bytes


def evaluation_bytes(network: TrainingProperties, examples: int, *, library: str = "") -> int:
    """Return the peak memory of evaluating `examples` at once, without the torch engine's base memory."""
    fixed_bytes = fixed_training_bytes(
        network.weights_bytes, network.convolutions, library=library, kinds=network.kinds
    )
    return fixed_bytes + examples * bytes_per_example(network)


def bytes_per_example(network: TrainingProperties) -> int:
    """Return the memory per example of a training step that keeps all activations."""
    return network.kept_bytes + _working_bytes(network)


def least_bytes_per_example(network: TrainingProperties) -> int:
    """Return the least memory per example, with activations recomputed in MAX_PIECES pieces."""
    return -(-network.kept_bytes // MAX_PIECES) + _working_bytes(network, is_recomputed=True)


def checkpoint_bytes(network: TrainingProperties, examples: int, room_bytes: float) -> int | None:
    """Return the bytes of activations to keep at once within `room_bytes`, or None if all activations fit.

    The result is at least the size of one of MAX_PIECES pieces, even if the piece does not fit, because each further
    piece costs up to one more forward pass.
    """
    kept_bytes = examples * network.kept_bytes
    if kept_bytes <= int(room_bytes) - examples * _working_bytes(network):
        return None
    left_bytes = int(room_bytes) - examples * _working_bytes(network, is_recomputed=True)
    return max(min(left_bytes, kept_bytes), -(-kept_bytes // MAX_PIECES))


def _working_bytes(network: TrainingProperties, *, is_recomputed: bool = False) -> int:
    return max(
        (RECOMPUTED_WORKING_COPIES if is_recomputed else WORKING_COPIES) * network.largest_kept_bytes,
        OUTPUT_COPIES * network.largest_output_bytes,
    )


SESSION_BYTES = 2 << 20  # an ONNX Runtime session without weights and activations


def inference_bytes(weights_bytes: int, activation_bytes: int, examples: int) -> int:
    """Return the peak memory of one graph above ONNX Runtime's own, including memory-mapped weights."""
    return SESSION_BYTES + weights_bytes + examples * activation_bytes


BELOW_SMALLEST_TIER: Final = "under 1GB"
# FedStitch (arXiv 2409.07202, section V-A4) gives 30, 30, 30 and 10 % of its devices these sizes for a task.
TIER_BYTES: Final[dict[str, int]] = {f"{count}GB": count * 10**9 for count in (1, 2, 4, 8)}


class TierDevice(NamedTuple):
    profile: Profile
    examples: int | None = None  # number of examples, or None before the device's report


class TierCoverage(NamedTuple):
    devices: int = 0
    capable: int = 0  # devices with an engine and memory for the work
    examples: int = 0  # of devices that have reported their number of examples
    capable_examples: int = 0
    unknown: int = 0  # devices that have not reported their number of examples


def tier_from_profile(profile: Profile | None) -> str:
    """Return the largest tier within a device's budget, or "" if the device has sent no profile."""
    if profile is None:
        return ""
    tiers = (name for name, size in reversed(TIER_BYTES.items()) if profile.budget_bytes >= size)
    return next(tiers, BELOW_SMALLEST_TIER)


def largest_tier_within(profile: Profile | None, tiers: Collection[str]) -> str:
    """Return the largest of the given tiers within a device's budget, or "" if there is none."""
    budget_bytes = profile.budget_bytes if profile is not None else 0
    return next((name for name in reversed(TIER_BYTES) if name in tiers and budget_bytes >= TIER_BYTES[name]), "")


def fits_budget(budget_bytes: int, engines: Iterable[str], work: WorkEstimate) -> bool:
    return any(budget_bytes >= task_process_bytes(engine, work.peak_bytes) for engine in engines)


def tier_coverage(fleet: Iterable[TierDevice], engines: Iterable[str], work: WorkEstimate) -> dict[str, TierCoverage]:
    """Count each tier's devices and examples, in total and with enough memory, smallest tier first."""
    engine_names = tuple(engines)
    coverage: dict[str, TierCoverage] = {}
    for device in fleet:
        usable_engines = [engine for engine in engine_names if engine in device.profile.engines]
        is_able = fits_budget(device.profile.budget_bytes, usable_engines, work)
        name = tier_from_profile(device.profile)
        count = device.examples or 0
        device_counts = TierCoverage(1, int(is_able), count, count * is_able, int(device.examples is None))
        coverage[name] = _sum_counts((coverage.get(name, TierCoverage()), device_counts))
    return {name: coverage[name] for name in (BELOW_SMALLEST_TIER, *TIER_BYTES) if name in coverage}


def format_coverage(fleet: Sequence[TierDevice], engines: Sequence[str], work: WorkEstimate) -> list[str]:
    """Return lines on the devices with enough memory, in total and by tier, or [] without devices."""
    if not fleet:
        return []
    coverage = tier_coverage(fleet, engines, work)
    total = _sum_counts(coverage.values())
    installed = {engine for device in fleet for engine in device.profile.engines}
    engine = next((name for name in engines if name in installed), engines[0])
    engine_size = f"{engine} engine {units.format_bytes(task_process_bytes(engine, 0))} assumed"
    budgets = sorted(device.profile.budget_bytes for device in fleet)
    budget = " to ".join(dict.fromkeys(map(units.format_bytes, (budgets[0], budgets[-1]))))
    need = f"{engine_size} + work {units.format_bytes(work.peak_bytes)} of budget {budget}"
    lines = [f"could take part ({need}): {_format_counts(total)}"]
    if len(coverage) > 1:
        lines += [f"  {name}: {_format_counts(share)}" for name, share in coverage.items()]
    return lines


def _format_counts(share: TierCoverage) -> str:
    text = f"{share.capable} of {share.devices} devices"
    if share.unknown < share.devices:
        text += f", {share.capable_examples} of {share.examples} examples"
        if share.unknown:
            text += f" ({share.unknown} have not reported their number)"
    return text


def _sum_counts(shares: Iterable[TierCoverage]) -> TierCoverage:
    return TierCoverage(*map(sum, zip(*shares, strict=True)))
