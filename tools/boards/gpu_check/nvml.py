"""NVIDIA's management library, which comes with the driver of PC GPUs. Most Jetsons have none."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from fedquilt.core import Power
from fedquilt.core.device import Covers

LIBRARY: Final = "libnvidia-ml.so.1"
GRAPHICS, MEMORY = 0, 2  # kinds of clocks


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class NvmlGpu:
    """GPU of NVML, also a meter. Values that the driver lacks are None, with the reason in `faults`.

    Args:
        uuid: Id of the GPU as torch gives it, or None for the first.
        library: The loaded library, for tests.

    Raises:
        OSError: If there is no library, or the GPU is not there.
    """

    covers: Covers = "rail"

    def __init__(self, uuid: str | None = None, library: Any = None) -> None:
        self._library = library or ctypes.CDLL(LIBRARY)
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._device = ctypes.c_void_p()
        self.faults: dict[str, str] = {}
        if code := self._library.nvmlInit_v2():
            raise OSError(self._explain(code))
        code = 1
        if uuid is not None:
            name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
            code = self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._device))
        if code and (code := self._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device))):
            raise OSError(self._explain(code))
        self._first_mj = self._number("TotalEnergyConsumption", ctypes.c_ulonglong)

    def read(self, now_s: float) -> Power:
        milliwatts, counted = self._number("PowerUsage"), None
        if self._first_mj is not None:
            counted = self._number("TotalEnergyConsumption", ctypes.c_ulonglong)
        return Power(
            None if milliwatts is None else milliwatts / 1e3,
            "NVML",
            energy_j=None if counted is None or self._first_mj is None else (counted - self._first_mj) / 1e3,
        )

    def driver(self) -> str | None:
        text = ctypes.create_string_buffer(96)
        return None if self._library.nvmlSystemGetDriverVersion(text, 96) else text.value.decode(errors="replace")

    def power_limit_w(self, *, default: bool = False) -> float | None:
        found = self._number("PowerManagementDefaultLimit" if default else "EnforcedPowerLimit")
        return None if found is None else found / 1e3

    def busy_share(self) -> float | None:
        found = self._structure("UtilizationRates", _Utilization)
        return None if found is None else found.gpu / 100

    def used_bytes(self) -> int | None:
        found = self._structure("MemoryInfo", _Memory)
        return None if found is None else int(found.used)

    def clock_hz(self, kind: int, *, highest: bool = False) -> float | None:
        found = self._number("MaxClockInfo" if highest else "ClockInfo", ctypes.c_uint, kind)
        return None if found is None else found * 1e6

    def _number(self, name: str, kind: Any = ctypes.c_uint, *given: int) -> int | None:
        found = self._structure(name, kind, *given)
        return None if found is None else int(found.value)

    def _structure(self, name: str, kind: Any, *given: int) -> Any:
        found = kind()
        try:
            code = getattr(self._library, f"nvmlDeviceGet{name}")(self._device, *given, ctypes.byref(found))
        except AttributeError:  # an older driver
            self.faults[name] = "this driver has no such call"
            return None
        if code:
            self.faults[name] = self._explain(code)
        return None if code else found

    def _explain(self, code: int) -> str:
        text: bytes | None = self._library.nvmlErrorString(code)
        return (text or b"").decode(errors="replace") or f"error {code}"
