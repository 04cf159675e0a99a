"""Batch normalisation over whole mini-batches in little memory, with bit-identical results.

Batch normalisation couples the examples of a mini-batch, so that micro-batches would take another step. A network with
batch normalisation therefore runs with its whole mini-batch. If the tensors saved for the backward pass do not fit,
`run_with_recomputation` saves none: the backward pass recomputes them piece by piece, from the last to the first, by
repeating the forward pass up to each piece.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm

from fedquilt.core import ModelError

T = TypeVar("T")
M_MMAP_THRESHOLD: Final = -3  # of mallopt(3)
OWN_PAGES_BYTES: Final = 128 << 10  # allocations of at least this size have pages of their own


def has_coupled_examples(model: nn.Module) -> bool:
    norms = (each for each in model.modules() if isinstance(each, _BatchNorm))
    return any(each.training or each.running_mean is None for each in norms)


def handle_single_values(model: nn.Module) -> None:
    """Make batch normalisation use its running statistics where a channel has a single value.

    This occurs in a last mini-batch of one example, behind pooling or in a fully connected network: a single value has
    no variance, and torch refuses the step. For this step the layer works as in evaluation mode.

    Raises, in such a step:
        ModelError: If the layer has no running statistics.
    """

    def freeze_single_value(path: str, layer: Any, inputs: tuple[Any, ...]) -> None:
        single = layer.training and inputs[0].numel() == inputs[0].shape[1]
        if single and layer.running_mean is None:
            raise ModelError(
                f"batch normalisation {path!r} keeps no running statistics, and a mini-batch of one example leaves it "
                "one value for each channel: choose a batch that leaves no single example over"
            )
        layer.single = single
        if single:
            layer.training = False

    def unfreeze(layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if layer.single:
            layer.training = True

    for path, each in model.named_modules():
        if isinstance(each, _BatchNorm):
            each.register_forward_pre_hook(lambda layer, inputs, path=path: freeze_single_value(path, layer, inputs))
            each.register_forward_hook(unfreeze, always_call=True)


def return_freed_memory() -> None:
    """Make glibc return freed tensors to the kernel at once, for the rest of this process.

    Otherwise glibc keeps freed memory in holes between live tensors: with ResNet-20 as much as if all tensors were
    kept. The kernel clears pages more often then, which costs time.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, OWN_PAGES_BYTES)


def run_with_recomputation(
    model: nn.Module, forward: Callable[[], T], lasting: Iterable[torch.Tensor], piece_bytes: int
) -> T:
    """Return the result of `forward`, whose backward pass recomputes saved tensors in pieces.

    Args:
        model: Network whose buffers and parameters the pass uses.
        forward: Function that runs the model, repeated from the same random state and buffers.
        lasting: Tensors besides the model's that stay in memory until the end of the backward pass.
        piece_bytes: Most bytes of recomputed tensors held at once.
    """
    again = _RecomputePass(model, forward, lasting, piece_bytes)
    with torch.autograd.graph.saved_tensors_hooks(again.pack_tensor, again.unpack_tensor):
        return forward()


class _SavedTensor:
    __slots__ = ("__weakref__", "index", "value")

    def __init__(self, index: int) -> None:
        self.index = index
        self.value: torch.Tensor | None = None


class _StopForward(Exception): ...


class _RecomputePass:
    """One forward pass: the tensors it would have kept, in order."""

    def __init__(
        self, model: nn.Module, forward: Callable[[], Any], lasting: Iterable[torch.Tensor], piece_bytes: int
    ) -> None:
        self._forward, self._piece_bytes = forward, piece_bytes
        self._buffers = list(model.buffers())
        self._begun = [value.clone() for value in self._buffers]
        self._random = _random_state()
        held = [*model.parameters(), *self._buffers, *lasting]
        self._lasting = {value.untyped_storage().data_ptr() for value in held}
        self._kept: list[weakref.ref[_SavedTensor]] = []
        self._sizes: list[int] = []  # bytes that each adds to those before it
        self._seen: dict[int, StorageWeakRef] = {}

    def pack_tensor(self, value: torch.Tensor) -> Any:
        """Return a placeholder for a saved tensor, or the tensor itself if it stays in memory."""
        storage = value.untyped_storage()
        if storage.data_ptr() in self._lasting:
            return value.detach()
        place = storage._cdata
        known = self._seen.get(place)
        self._sizes.append(0 if known is not None and not known.expired() else storage.nbytes())
        self._seen[place] = StorageWeakRef(storage)
        kept = _SavedTensor(len(self._kept))
        self._kept.append(weakref.ref(kept))
        return kept

    def unpack_tensor(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if kept.value is None:
            self._recompute(kept.index)
        if kept.value is None:
            raise ModelError("this network's forward pass is another one when it is repeated: give it more memory")
        return kept.value

    def _recompute(self, index: int) -> None:
        """Repeat the forward pass for the tensor at `index`, all later and, within `piece_bytes`, earlier ones."""
        wanted = [each for ref in self._kept if (each := ref()) is not None and each.value is None]
        piece, size = {}, 0
        for each in reversed(wanted):
            size += self._sizes[each.index]
            if each.index < index and size > self._piece_bytes:
                break
            piece[each.index] = each
        count, last = 0, max(piece)

        def keep_tensor(value: torch.Tensor) -> None:
            nonlocal count
            if value.untyped_storage().data_ptr() in self._lasting:
                return
            if count in piece:
                piece[count].value = value.detach()
            count += 1
            if count > last:
                raise _StopForward

        hooks = torch.autograd.graph.saved_tensors_hooks(keep_tensor, _reject_backward)
        with self._initial_state(), torch.enable_grad(), hooks, contextlib.suppress(_StopForward):
            self._forward()

    @contextmanager
    def _initial_state(self) -> Iterator[None]:
        later, random = [value.clone() for value in self._buffers], _random_state()
        self._set_state(self._begun, self._random)
        try:
            yield
        finally:
            self._set_state(later, random)

    def _set_state(self, values: list[torch.Tensor], random: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers, values, strict=True):
                buffer.copy_(value)
        torch.set_rng_state(random[0])
        for each in random[1:]:
            torch.cuda.set_rng_state(each)


def _random_state() -> list[torch.Tensor]:
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def _reject_backward(kept: None) -> torch.Tensor:
    raise AssertionError("the graph of a repeated forward pass has no backward pass")
