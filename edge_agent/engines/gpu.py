"""Memory of a GPU: bounded while a task runs, and counted with what the task's process holds resident.

The kernel does not count what a GPU holds for a process as resident, neither in a GPU's own memory nor, on a Jetson, in
the memory that both share. A task's budget is for the sum. torch's limit holds for its own allocator alone; the
driver's context comes on top, and is known only where both share one memory, as what is no longer available.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import psutil

CONTEXT_BYTES: Final = 200 * 10**6
"""Assumed for the driver's context in plans, which follow from constants; not measured."""
LEAST_SHARE: Final = 0.01  # of a GPU's memory, as a limit


class TorchMemory:
    """Memory that this process holds on torch's first GPU. Making one makes the driver's context.

    Args:
        cuda: `torch.cuda`.
        available_bytes: tells how much memory the board can still give.
    """

    def __init__(
        self, cuda: Any, available_bytes: Callable[[], int] = lambda: int(psutil.virtual_memory().available)
    ) -> None:
        self._cuda = cuda
        before = available_bytes()
        cuda.init()
        cuda.synchronize()
        taken = max(before - available_bytes(), 0)
        device = cuda.get_device_properties(0)
        self._total_bytes = int(device.total_memory)
        self._context_bytes = taken if device.is_integrated else 0

    def begin(self, most_bytes: int) -> int:
        """Return cached memory, forget the peak, and let torch's allocator take no more than this from now on.

        Returns:
            Bytes held now, the context among them.
        """
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(0)
        share = (most_bytes - self._context_bytes) / self._total_bytes
        self._cuda.set_per_process_memory_fraction(min(max(share, LEAST_SHARE), 1.0), 0)
        return self._context_bytes + int(self._cuda.memory_reserved(0))

    def peak_bytes(self) -> int:
        """Most bytes held at once since `begin`, the context among them."""
        return self._context_bytes + int(self._cuda.max_memory_reserved(0))
