"""Peak memory of training and inference above an idle engine, predicted for engines and admission.

Only `measure_training` imports torch. Constants were fitted on x86-64 (torch 2.13 for
the CPU, onnxruntime 1.31, glibc 2.36). A device learns its own error while working
(`fedquilt.edge_agent.task.memory_budget`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fedquilt.console import units
from fedquilt.core import Profile, WorkEstimate

if TYPE_CHECKING:
    import torch
    from torch import nn

# What a task's process holds once its engine is imported: measured on x86-64, until a board's own is known.
ASSUMED_BASE_BYTES: Mapping[str, int] = {"numpy": 38 * 10**6, "onnx": 57 * 10**6, "torch": 233 * 10**6}
# What an engine loads and compiles when it is first used, whatever the work.
FIRST_USE_BYTES: Mapping[str, int] = {"onnx": 12 * 10**6, "torch": 18 * 10**6}
# What torch loads on a GPU for the shapes of a task, beside the kernels that every process loads: 68 MB on an H100.
GPU_KERNELS_BYTES = 100 * 10**6
# What glibc holds of freed pieces, at most, where a task runs one graph after another: `fedquilt lab bench memory`.
FREED_BYTES: Mapping[str, int] = {"onnx": 20 * 10**6}


def task_process_bytes(engine: str, peak_bytes: int, base_bytes: int | None = None) -> int:
    """Return the peak memory of a task's process: imported and active engine, freed memory, and work."""
    base = ASSUMED_BASE_BYTES.get(engine, 0) if base_bytes is None else base_bytes
    return base + FIRST_USE_BYTES.get(engine, 0) + FREED_BYTES.get(engine, 0) + peak_bytes


@dataclass(frozen=True)
class TrainingProperties:
    weights_bytes: int  # parameters and buffers
    convolutions: int  # convolution layers
    largest_bytes: int  # the largest of them
    kept_bytes: int  # activations of one example that the forward pass keeps for the backward one
    widest_bytes: int  # largest of those
    still_bytes: int = 0  # part of the parameters that is frozen: without gradients and moments
    passing_bytes: int = 0  # largest activation of one example, kept or not
    kinds: int = 0  # of operations in its backward pass, beside USUAL


def measure_training(model: nn.Module, x: torch.Tensor) -> tuple[TrainingProperties, torch.Tensor]:
    """Measure a network's training memory with one forward pass, and return the pass's output too.

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
        return value.detach()  # the value itself would hold the graph that holds it: torch never frees such a circle

    largest_output = 0

    def record_output(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal largest_output
        if isinstance(output, torch.Tensor):
            largest_output = max(largest_output, output.nbytes)

    watches = [module.register_forward_hook(record_output) for module in model.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(record_storage, lambda value: value):
            output = model.train()(x)
    finally:
        for watch in watches:
            watch.remove()
    weights = [value.untyped_storage().nbytes() for value in model_tensors]
    trained = TrainingProperties(
        weights_bytes=sum(weights),
        convolutions=sum(isinstance(layer, nn.modules.conv._ConvNd) for layer in model.modules()),
        largest_bytes=max(weights, default=0),
        kept_bytes=-(-sum(kept_bytes.values()) // len(x)),
        widest_bytes=-(-max(kept_bytes.values(), default=0) // len(x)),
        still_bytes=sum(value.untyped_storage().nbytes() for value in model.parameters() if not value.requires_grad),
        passing_bytes=-(-largest_output // len(x)),
        kinds=len(_backward_operations(output) - USUAL),
    )
    return trained, output


def _backward_operations(output: object) -> set[str]:
    operations: set[str] = set()
    seen, pending = set(), [getattr(output, "grad_fn", None)]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            operations.add(node.name().rstrip("0123456789"))
            pending += [previous for previous, _ in node.next_functions]
    return operations


# What the library of a network holds besides, once it is imported; torchvision imports torch's compiler.
LIBRARY_BYTES = {"torchvision": 64_000_000}
# What is compiled for a network's convolutions: once, and for each of them.
FIRST_KERNEL_BYTES, KERNEL_BYTES = 9_000_000, 500_000
# Operations that FIRST_USE_BYTES includes: those of the networks that it was fitted with.
_USUAL = "Add Addmm Cat Convolution MaxPool2DWithIndices Mean NativeBatchNorm Relu T View"
USUAL = frozenset(f"{name}Backward" for name in _USUAL.split()) | {"torch::autograd::AccumulateGrad"}
# What each other kind of operation adds, whatever its size: pages of torch's libraries with its two passes.
KIND_BYTES = 400_000
COPIES = 2
"""Of the weights: as received, and the model's own. Anchors, as a correction's start, come on top; of what is trained
also the gradients, and what the optimizer remembers."""
FREED = 0.5  # times the weights is what glibc holds of tensors that came and went
# Times the widest activation is at work besides those kept: gradients in and out, scratch, and what glibc holds.
WIDEST = 10
# Likewise where what is kept is made again in pieces: glibc then holds nothing, as memory goes back to the kernel.
WIDEST_AGAIN = 9
# Times the largest activation is at work where nothing is kept of it: before the first tensor that is trained.
PASSING = 4

# Of the trained tensors, in the optimizer's state, beside a momentum of sgd.
OPTIMIZER_COPIES: Mapping[str, int] = {"sgd": 0, "adam": 2, "adamw": 2}
TORCH_OPTIMIZER_COPIES = 3  # likewise of any class of `torch.optim`, at most
# What classes of `torch.optim` and of `torchvision.transforms` import: torch's compiler, and torchvision with it.
TORCH_OPTIMIZER_BYTES, TRANSFORMS_BYTES = 80_000_000, 92_000_000

PIECES = 8  # into how many parts at most what is kept for the backward pass is divided, where it does not fit

# True peaks were up to so many times what was predicted: who is held to a budget plans with so much less.
MARGIN = 1.1


def training_bytes(
    network: TrainingProperties,
    examples: int,
    *,
    anchors: int = 0,
    moments: int = 0,
    library: str = "",
    piece_bytes: int | None = None,
) -> int:
    """Return the peak memory of a training step above active torch. `piece_bytes` limits kept activations."""
    moving = (1 + moments) * (network.weights_bytes - network.still_bytes)
    fixed = fixed_training_bytes(
        network.weights_bytes,
        network.convolutions,
        moving,
        copies=COPIES + anchors,
        library=library,
        kinds=network.kinds,
    )
    kept_bytes = examples * network.kept_bytes
    held_bytes = kept_bytes if piece_bytes is None else min(piece_bytes, kept_bytes)
    return fixed + examples * _working_bytes(network, again=piece_bytes is not None) + held_bytes


def choice_name(choice: str | Mapping[str, Any]) -> str:
    return str(choice["name"] if isinstance(choice, Mapping) else choice)


def optimizer_copies(params: Mapping[str, Any]) -> int:
    copies = OPTIMIZER_COPIES.get(choice_name(params.get("optimizer", "sgd")), TORCH_OPTIMIZER_COPIES)
    return copies or int(params.get("momentum", 0) > 0)


def imported_bytes(params: Mapping[str, Any], library: str = "") -> int:
    """Return the memory of the imports of optimizer and transforms, without those of the network's library."""
    names = [choice_name(choice) for choice in (params.get("optimizer", "sgd"), *params.get("augment", ()))]
    classes = [name[:1].isupper() and ":" not in name for name in names]  # of torch and torchvision
    largest = max(classes[0] * TORCH_OPTIMIZER_BYTES, any(classes[1:]) * TRANSFORMS_BYTES)
    return max(largest - LIBRARY_BYTES.get(library, 0), 0)


def fixed_training_bytes(
    weights_bytes: int,
    convolutions: int,
    moving_bytes: int = 0,
    *,
    copies: int = COPIES,
    library: str = "",
    kinds: int = 0,
) -> int:
    """Return the part of `training_bytes` that is independent of the micro-batch."""
    compiled = FIRST_KERNEL_BYTES * min(convolutions, 1) + KERNEL_BYTES * convolutions
    total_bytes = compiled + KIND_BYTES * kinds
    return LIBRARY_BYTES.get(library, 0) + total_bytes + int((copies + FREED) * weights_bytes) + moving_bytes


def evaluation_bytes(network: TrainingProperties, examples: int, *, library: str = "") -> int:
    fixed = fixed_training_bytes(network.weights_bytes, network.convolutions, library=library, kinds=network.kinds)
    return fixed + examples * bytes_per_example(network)


def bytes_per_example(network: TrainingProperties) -> int:
    return network.kept_bytes + _working_bytes(network)


def least_bytes_per_example(network: TrainingProperties) -> int:
    """Return the memory per example with activations recomputed in PIECES."""
    return -(-network.kept_bytes // PIECES) + _working_bytes(network, again=True)


def checkpoint_bytes(network: TrainingProperties, examples: int, room_bytes: float) -> int | None:
    """Return the activation bytes to keep at once in the given room, or None to keep all.

    The result is at least the size of one of PIECES, because each further piece costs up to one more forward pass.
    """
    kept_bytes = examples * network.kept_bytes
    if kept_bytes <= int(room_bytes) - examples * _working_bytes(network):
        return None
    left_bytes = int(room_bytes) - examples * _working_bytes(network, again=True)
    return max(min(left_bytes, kept_bytes), -(-kept_bytes // PIECES))


def _working_bytes(network: TrainingProperties, *, again: bool = False) -> int:
    return max((WIDEST_AGAIN if again else WIDEST) * network.widest_bytes, PASSING * network.passing_bytes)


SESSION_BYTES = 2 << 20  # an ONNX Runtime session beside its weights and activations


def inference_bytes(weights_bytes: int, activation_bytes: int, examples: int) -> int:
    """Return the peak memory of one graph above ONNX Runtime, with memory-mapped weights."""
    return SESSION_BYTES + weights_bytes + examples * activation_bytes


BELOW: Final = "under 1GB"
# FedStitch (arXiv 2409.07202, section V-A4) gives 30, 30, 30 and 10 % of its devices these sizes for a task.
SIZES: Final[dict[str, int]] = {f"{count}GB": count * 10**9 for count in (1, 2, 4, 8)}


class TierDevice(NamedTuple):
    profile: Profile
    examples: int | None = None  # of its own; None: not reported yet


class TierCoverage(NamedTuple):
    """Number of devices and examples of a tier, and those that could take part."""

    devices: int = 0
    able: int = 0
    examples: int = 0  # of the devices that have reported their number
    able_examples: int = 0
    unknown: int = 0  # devices that have not reported it


def tier_from_profile(profile: Profile | None) -> str:
    """Return the largest tier within a device's budget, or "" if the device has sent no profile."""
    if profile is None:
        return ""
    return next((name for name, size in reversed(SIZES.items()) if profile.budget_bytes >= size), BELOW)


def fits_budget(budget_bytes: int, engines: Iterable[str], work: WorkEstimate) -> bool:
    return any(budget_bytes >= task_process_bytes(engine, work.peak_bytes) for engine in engines)


def tier_coverage(fleet: Iterable[TierDevice], engines: Iterable[str], work: WorkEstimate) -> dict[str, TierCoverage]:
    """Return which part of each tier could take part, smallest tier first, without empty tiers."""
    engine_names = tuple(engines)
    coverage: dict[str, TierCoverage] = {}
    for member in fleet:
        usable_engines = [engine for engine in engine_names if engine in member.profile.engines]
        is_able = fits_budget(member.profile.budget_bytes, usable_engines, work)
        name = tier_from_profile(member.profile)
        count = member.examples or 0
        device_counts = TierCoverage(1, int(is_able), count, count * is_able, int(member.examples is None))
        coverage[name] = _sum_counts((coverage.get(name, TierCoverage()), device_counts))
    return {name: coverage[name] for name in (BELOW, *SIZES) if name in coverage}


def format_coverage(found: Mapping[str, TierCoverage], work: WorkEstimate) -> list[str]:
    if not found:
        return []
    total = _sum_counts(found.values())
    need = f"{units.format_bytes(work.peak_bytes)} beside the engine" if work.peak_bytes else "no more than the engine"
    lines = [f"could take part ({need}): {_format_counts(total)}"]
    if len(found) > 1:
        lines += [f"  {name}: {_format_counts(share)}" for name, share in found.items()]
    return lines


def _format_counts(share: TierCoverage) -> str:
    text = f"{share.able} of {share.devices} devices"
    if share.unknown < share.devices:
        text += f", {share.able_examples} of {share.examples} examples"
        if share.unknown:
            text += f" ({share.unknown} have not said how many)"
    return text


def _sum_counts(shares: Iterable[TierCoverage]) -> TierCoverage:
    return TierCoverage(*map(sum, zip(*shares, strict=True)))
