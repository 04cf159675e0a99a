"""Batch normalisation over whole mini-batches in little memory, with bit-identical results.

Batch normalisation couples the examples of a mini-batch, so that micro-batches would change the step. A network with
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
M_MMAP_THRESHOLD: Final = -3  # parameter of mallopt(3)
OWN_PAGES_BYTES: Final = 128 << 10  # allocations of at least this size have pages of their own


def has_coupled_examples(model: nn.Module) -> bool:
    """Return whether the model has batch normalisation that uses the statistics of the mini-batch."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return any(module.training or module.running_mean is None for module in norms)


def handle_single_values(model: nn.Module) -> None:
    """Make batch normalisation use its running statistics where a channel has a single value.

    This occurs in a last mini-batch of one example, after pooling or in a fully connected network. A single value has
    no variance, and torch raises an error. For this step the layer works as in evaluation mode.

    Raises, in such a step:
        ModelError: If the layer has no running statistics.
    """

    def freeze_single_value(path: str, layer: Any, inputs: tuple[Any, ...]) -> None:
        single = layer.training and inputs[0].numel() == inputs[0].shape[1]
        if single and layer.running_mean is None:
            raise ModelError(
                f"batch normalisation {path!r} has no running statistics and gets one value per channel from a "
                "mini-batch of one example: choose a batch size that leaves no single example"
            )
        layer.takes_single_examples = single
        if single:
            layer.training = False

    def unfreeze(layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if layer.takes_single_examples:
            layer.training = True

    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(lambda layer, inputs, path=path: freeze_single_value(path, layer, inputs))
            module.register_forward_hook(unfreeze, always_call=True)


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
    recompute_pass = _RecomputePass(model, forward, lasting, piece_bytes)
    with torch.autograd.graph.saved_tensors_hooks(recompute_pass.pack_tensor, recompute_pass.unpack_tensor):
        return forward()


class _SavedTensor:
    __slots__ = ("__weakref__", "index", "value")

    def __init__(self, index: int) -> None:
        self.index = index
        self.value: torch.Tensor | None = None


class _StopForward(Exception): ...


class _RecomputePass:
    def __init__(
        self, model: nn.Module, forward: Callable[[], Any], lasting: Iterable[torch.Tensor], piece_bytes: int
    ) -> None:
        self._forward, self._piece_bytes = forward, piece_bytes
        self._buffers = list(model.buffers())
        self._initial_buffers = [value.clone() for value in self._buffers]
        self._initial_random = _random_state()
        lasting_tensors = [*model.parameters(), *self._buffers, *lasting]
        self._lasting = {value.untyped_storage().data_ptr() for value in lasting_tensors}
        self._saved: list[weakref.ref[_SavedTensor]] = []
        self._sizes: list[int] = []  # cumulative bytes of the saved tensors
        self._storages: dict[int, StorageWeakRef] = {}

    def pack_tensor(self, value: torch.Tensor) -> Any:
        """Return a placeholder for a saved tensor, or the tensor itself if it stays in memory."""
        storage = value.untyped_storage()
        if storage.data_ptr() in self._lasting:
            return value.detach()
        storage_id = storage._cdata
        previous = self._storages.get(storage_id)
        self._sizes.append(0 if previous is not None and not previous.expired() else storage.nbytes())
        self._storages[storage_id] = StorageWeakRef(storage)
        placeholder = _SavedTensor(len(self._saved))
        self._saved.append(weakref.ref(placeholder))
        return placeholder

    def unpack_tensor(self, placeholder: Any) -> torch.Tensor:
        if isinstance(placeholder, torch.Tensor):
            return placeholder
        if placeholder.value is None:
            self._recompute(placeholder.index)
        if placeholder.value is None:
            raise ModelError(
                "this network's forward pass differs when repeated, and must be to save memory: raise budget"
            )
        return placeholder.value

    def _recompute(self, index: int) -> None:
        """Repeat the forward pass to restore the tensors of one piece, which ends with the tensor at `index`.

        Missing tensors after `index` are restored too.
        """
        missing = [saved for ref in self._saved if (saved := ref()) is not None and saved.value is None]
        saved_by_index, size = {}, 0
        for saved in reversed(missing):
            size += self._sizes[saved.index]
            if saved.index < index and size > self._piece_bytes:
                break
            saved_by_index[saved.index] = saved
        count, last_index = 0, max(saved_by_index)

        def keep_tensor(value: torch.Tensor) -> None:
            nonlocal count
            if value.untyped_storage().data_ptr() in self._lasting:
                return
            if count in saved_by_index:
                saved_by_index[count].value = value.detach()
            count += 1
            if count > last_index:
                raise _StopForward

        hooks = torch.autograd.graph.saved_tensors_hooks(keep_tensor, _reject_backward)
        with self._initial_state(), torch.enable_grad(), hooks, contextlib.suppress(_StopForward):
            self._forward()

    @contextmanager
    def _initial_state(self) -> Iterator[None]:
        current_buffers, random = [value.clone() for value in self._buffers], _random_state()
        self._set_state(self._initial_buffers, self._initial_random)
        try:
            yield
        finally:
            self._set_state(current_buffers, random)

    def _set_state(self, values: list[torch.Tensor], random: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers, values, strict=True):
                buffer.copy_(value)
        torch.set_rng_state(random[0])
        for cuda_state in random[1:]:
            torch.cuda.set_rng_state(cuda_state)


def _random_state() -> list[torch.Tensor]:
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def _reject_backward(placeholder: None) -> torch.Tensor:
    raise AssertionError("the graph of a repeated forward pass has no backward pass")
