"""GPU memory of a task's process, which is limited and counted with the resident memory.

The kernel does not count GPU memory as resident, not even the memory that a Jetson's GPU shares with the processor. A
task's budget is for the sum. torch's limit applies to its own allocator only. The driver's context comes on top, and
can be measured only with shared memory, as the decrease of the available memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import psutil

CONTEXT_BYTES: Final = 200 * 10**6
"""Assumed for the driver's context in plans, which follow from constants; not measured."""
LEAST_SHARE: Final = 0.01  # of a GPU's memory, as a limit


class TorchMemory:
    """Memory of this process on torch's first GPU. The constructor creates the driver's context.

    Args:
        cuda: The module `torch.cuda`.
        available_bytes: Function that returns the available memory of the board.
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
        """Release cached memory, reset the peak, and limit torch's allocator.

        Args:
            most_bytes: Most GPU memory from now on, including the context.

        Returns:
            Bytes in use now, including the context.
        """
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(0)
        share = (most_bytes - self._context_bytes) / self._total_bytes
        self._cuda.set_per_process_memory_fraction(min(max(share, LEAST_SHARE), 1.0), 0)
        return self._context_bytes + int(self._cuda.memory_reserved(0))

    def peak_bytes(self) -> int:
        """Return the peak memory since `begin` in bytes, including the driver's context."""
        return self._context_bytes + int(self._cuda.max_memory_reserved(0))
