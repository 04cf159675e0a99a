"""Peak memory of work above an idle engine: one model for engines, orders and admission.

Light: torch is imported by `weigh` alone. Constants were fitted with `fedquilt bench footprint` on x86-64
(torch 2.13 for the CPU, onnxruntime 1.31, glibc 2.36); a board learns its own error as it works
(`fedquilt.edge_agent.task.budget.Caution`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

ASSUMED_BASE_BYTES: Mapping[str, int] = {"numpy": 38 * 10**6, "onnx": 57 * 10**6, "torch": 233 * 10**6}
"""What a task's process holds once its engine is imported: measured on x86-64, until a board's own is known."""
FIRST_USE_BYTES: Mapping[str, int] = {"onnx": 12 * 10**6, "torch": 18 * 10**6}
"""What an engine loads and compiles when it is first used, whatever the work."""
FREED_BYTES: Mapping[str, int] = {"onnx": 20 * 10**6}
"""What glibc holds of freed pieces, at most, where a task runs one graph after another: `fedquilt bench memory`."""


def need_bytes(engine: str, peak_bytes: int, base_bytes: int | None = None) -> int:
    """Peak memory of a task's process: the engine imported and active, with what it has freed, plus the work.

    Args:
        engine: name.
        peak_bytes: of the work, above the active engine.
        base_bytes: of the process with only the engine imported; None: as assumed.
    """
    base = ASSUMED_BASE_BYTES.get(engine, 0) if base_bytes is None else base_bytes
    return base + FIRST_USE_BYTES.get(engine, 0) + FREED_BYTES.get(engine, 0) + peak_bytes


@dataclass(frozen=True)
class Trained:
    """Properties of a network that determine the memory of its training."""

    weights_bytes: int  # parameters and buffers
    convolutions: int  # convolution layers
    largest_bytes: int  # the largest of them
    kept_bytes: int  # activations of one example that the forward pass keeps for the backward one
    widest_bytes: int  # largest of those
    still_bytes: int = 0  # part of the parameters that is frozen: without gradients and moments
    passing_bytes: int = 0  # largest activation of one example, kept or not
    kinds: int = 0  # of operations in its backward pass, beside USUAL


def weigh(model: nn.Module, x: torch.Tensor) -> tuple[Trained, torch.Tensor]:
    """Measure a network's memory in training, and its scores (n, ...), by a forward pass of a few examples (n, ...).

    A parameter without gradient is frozen: activations that only it needs are not kept.
    The pass is in training mode: it updates the statistics of batch normalisation, and takes two
    examples if the network has any.
    """
    import torch
    from torch import nn

    held = [*model.parameters(), *model.buffers()]
    own = {value.untyped_storage().data_ptr() for value in held}
    kept: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return value.detach()  # the value itself would hold the graph that holds it: torch never frees such a circle

    passing = 0

    def passed(module: nn.Module, given: object, found: object) -> None:
        nonlocal passing
        if isinstance(found, torch.Tensor):
            passing = max(passing, found.nbytes)

    watches = [module.register_forward_hook(passed) for module in model.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            answer = model.train()(x)
    finally:
        for watch in watches:
            watch.remove()
    weights = [value.untyped_storage().nbytes() for value in held]
    trained = Trained(
        weights_bytes=sum(weights),
        convolutions=sum(isinstance(each, nn.modules.conv._ConvNd) for each in model.modules()),
        largest_bytes=max(weights, default=0),
        kept_bytes=-(-sum(kept.values()) // len(x)),
        widest_bytes=-(-max(kept.values(), default=0) // len(x)),
        still_bytes=sum(value.untyped_storage().nbytes() for value in model.parameters() if not value.requires_grad),
        passing_bytes=-(-passing // len(x)),
        kinds=len(_kinds(answer) - USUAL),
    )
    return trained, answer


def _kinds(answer: object) -> set[str]:
    """Names of the operations in the backward pass of a network's answer, as torch calls them."""
    found: set[str] = set()
    seen, left = set(), [getattr(answer, "grad_fn", None)]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(node.name().rstrip("0123456789"))
            left += [before for before, _ in node.next_functions]
    return found


# -- training -------------------------------------------------------------------------------------

LIBRARY_BYTES = {"torchvision": 64_000_000}
"""What the library of a network holds besides, once it is imported; torchvision imports torch's compiler."""
FIRST_KERNEL_BYTES, KERNEL_BYTES = 9_000_000, 500_000
"""What is compiled for a network's convolutions: once, and for each of them."""
USUAL = frozenset(
    f"{name}Backward"
    for name in (
        "Add",
        "Addmm",
        "Cat",
        "Convolution",
        "MaxPool2DWithIndices",
        "Mean",
        "NativeBatchNorm",
        "Relu",
        "T",
        "View",
    )
) | {"torch::autograd::AccumulateGrad"}
"""Operations that FIRST_USE_BYTES includes: those of the networks that it was fitted with."""
KIND_BYTES = 400_000
"""What each other kind of operation adds, whatever its size: pages of torch's libraries with its two passes."""
COPIES = 2
"""Of the weights: as received, and the model's own. Anchors, as a correction's start, come on top; of what is trained
also the gradients, and what the optimizer remembers."""
FREED = 0.5
"""Times the weights is what glibc holds of tensors that came and went."""
WIDEST = 10
"""Times the widest activation is at work besides those kept: gradients in and out, scratch, and what glibc holds."""
WIDEST_AGAIN = 9
"""Likewise where what is kept is made again in pieces: glibc then holds nothing, as memory goes back to the kernel."""
PASSING = 4
"""Times the largest activation is at work where nothing is kept of it: before the first tensor that is trained."""

PIECES = 8
"""Into how many parts at most what is kept for the backward pass is divided, where it does not fit."""

MARGIN = 1.1
"""True peaks were up to so many times what was predicted: who is held to a budget plans with so much less."""


def training_bytes(
    network: Trained,
    examples: int,
    *,
    anchors: int = 0,
    moments: int = 0,
    library: str = "",
    piece_bytes: int | None = None,
) -> int:
    """Peak memory of training steps on `examples` at once, above active torch.

    Args:
        network: as measured by `weigh`.
        examples: of a micro-batch.
        anchors: copies of the weights that a method reads, besides COPIES.
        moments: copies of the trained tensors in the optimizer's state.
        library: prefix of the network's name, up to a slash.
        piece_bytes: bytes kept for the backward pass that are held at once; None: all.
    """
    moving = (1 + moments) * (network.weights_bytes - network.still_bytes)
    fixed = fixed_bytes(
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


def fixed_bytes(
    weights_bytes: int,
    convolutions: int,
    moving_bytes: int = 0,
    *,
    copies: int = COPIES,
    library: str = "",
    kinds: int = 0,
) -> int:
    """Part of `training_bytes` that does not shrink with the micro-batch.

    Args:
        weights_bytes: of the network.
        convolutions: number of convolution layers.
        moving_bytes: gradients and optimizer state; 0 in an evaluation.
        copies: copies of the weights held at once.
        library: prefix of the network's name, up to a slash.
        kinds: of operations beside USUAL; orders, which know a network by its tensors alone, leave them out.
    """
    compiled = FIRST_KERNEL_BYTES * min(convolutions, 1) + KERNEL_BYTES * convolutions
    used = compiled + KIND_BYTES * kinds
    return LIBRARY_BYTES.get(library, 0) + used + int((copies + FREED) * weights_bytes) + moving_bytes


def example_bytes(network: Trained) -> int:
    """The part of `training_bytes` that each example adds."""
    return network.kept_bytes + _working_bytes(network)


def least_bytes(network: Trained) -> int:
    """Least memory of each example: its kept activations made again in PIECES, one held at a time."""
    return -(-network.kept_bytes // PIECES) + _working_bytes(network, again=True)


def piece_bytes(network: Trained, examples: int, room_bytes: float) -> int | None:
    """Kept bytes of `examples` that fit the room for activations at once; None: all.

    Never less than one of PIECES, however small the room: each further piece costs up to one more forward pass.
    """
    kept_bytes = examples * network.kept_bytes
    if kept_bytes <= int(room_bytes) - examples * _working_bytes(network):
        return None
    left_bytes = int(room_bytes) - examples * _working_bytes(network, again=True)
    return max(min(left_bytes, kept_bytes), -(-kept_bytes // PIECES))


def _working_bytes(network: Trained, *, again: bool = False) -> int:
    """Working memory of each example beside its kept activations, which may be made again in pieces."""
    return max((WIDEST_AGAIN if again else WIDEST) * network.widest_bytes, PASSING * network.passing_bytes)


# -- inference ------------------------------------------------------------------------------------

SESSION_BYTES = 2 << 20
"""An ONNX Runtime session beside its weights and activations."""


def scoring_bytes(weights_bytes: int, activation_bytes: int, examples: int) -> int:
    """Peak memory of one graph on `examples` at once, above ONNX Runtime, its weights mapped and not laid out anew.

    Args:
        weights_bytes: of the graph.
        activation_bytes: most that is held at once for one example (`fedquilt.models.stitching.onnx_memory`).
        examples: of a micro-batch.
    """
    return SESSION_BYTES + weights_bytes + examples * activation_bytes
