"""Memory and threads of a process."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

PROC: Final = Path("/proc")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
MAPPED_BYTES: Final = 4 << 20  # larger blocks return to the kernel when freed
KEPT_BYTES: Final = 8 << 20  # limit on unused memory at the end of the heap
_TRIM_THRESHOLD: Final = -1  # options of mallopt(3)
_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> None:
    """Make glibc keep freed memory of up to MAPPED_BYTES. No effect with other C libraries.

    By default glibc requests each chunk of a blob anew from the kernel, which clears 64 pages. That takes more than
    half of the processor time of a transfer over MQTT.
    """
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
        library.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def import_on_use(name: str) -> None:
    """Defer the import of a module until one of its names is used, unless the module is imported already."""
    if name in sys.modules:
        return
    deferred = sys.modules[name] = ModuleType(name)

    def load_name(name_to_load: str) -> Any:
        if sys.modules.get(name) is deferred:
            del sys.modules[name]
        return getattr(importlib.import_module(name), name_to_load)

    vars(deferred)["__getattr__"] = load_name
    package, _, module_name = name.rpartition(".")
    if package:
        setattr(importlib.import_module(package), module_name, deferred)


def resident_bytes(pid: int, proc: Path = PROC) -> int | None:
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def release_freed_memory() -> None:
    """Return memory freed within glibc's heap to the kernel. No effect with other C libraries."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


LIBRARY_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ORT_DISABLE_TELEMETRY": "1"}
"""Environment of numerical libraries, which read the variables at their import. Spinning idle threads slow down working
threads, ten times if agents share a host, and numpy's products are small here. ONNX Runtime from 1.32 on starts a
telemetry thread unless disabled."""


@contextmanager
def call_in_background(call: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Call `call` every `every_s` in a thread, until it returns False or the context ends."""
    is_finished = threading.Event()

    def repeat() -> None:
        while not is_finished.wait(every_s) and call() is not False:
            pass

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_finished.set()
        thread.join()
