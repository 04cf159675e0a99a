"""Values by device, and sets of rounds, in little memory.

Each device has a row, in the order in which this process first used the devices. A column is an array in this order, so
immutable columns are copied as one block, and copies, comparisons and draws are vectorised. Only comparisons and sets
import numpy, because commands that read a log import this module.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar, overload

from msgspec import Struct

from fedquilt.core import seed_deriver

if TYPE_CHECKING:
    import numpy as np


class RoundBitmap(Sequence[int]):
    """Immutable sequence of round numbers in ascending order, stored as a bitmap."""

    __slots__ = ("_bits",)

    def __init__(self, bits: int = 0) -> None:
        self._bits = bits

    @staticmethod
    def from_bytes(packed: bytes) -> RoundBitmap:
        return RoundBitmap(int.from_bytes(packed, "little"))

    def to_bytes(self) -> bytes:
        return self._bits.to_bytes((self._bits.bit_length() + 7) // 8, "little")

    def with_round(self, round: int, *, is_in: bool = True) -> RoundBitmap:
        return RoundBitmap(self._bits | 1 << round) if is_in else self

    def rounds_before(self, round: int) -> RoundBitmap:
        return RoundBitmap(self._bits & (1 << round) - 1)

    def without(self, other: RoundBitmap) -> RoundBitmap:
        return RoundBitmap(self._bits & ~other._bits)

    @property
    def last_round(self) -> int | None:
        return self._bits.bit_length() - 1 if self._bits else None

    def __contains__(self, round: object) -> bool:
        return isinstance(round, int) and round >= 0 and bool(self._bits >> round & 1)

    def __len__(self) -> int:
        return self._bits.bit_count()

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if index == -1 and self._bits:
            return self._bits.bit_length() - 1
        return [round for round, bit in enumerate(reversed(f"{self._bits:b}")) if bit == "1"][index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoundBitmap) and self._bits == other._bits

    def __hash__(self) -> int:
        return hash(self._bits)

    def __repr__(self) -> str:
        return f"RoundBitmap({list(self)})"


NEVER = RoundBitmap()


V = TypeVar("V")
C = TypeVar("C", bound="DeviceColumn[Any]")
ELIGIBLE: Final = ""  # label of a device that can be selected. Other labels are codes of `selection.REASONS`

hash_name: Final = seed_deriver("device")

_row_by_device: Final[dict[str, int]] = {}
_device_names: Final[list[str]] = []
_label_names: Final[list[str]] = [ELIGIBLE]
_label_numbers: Final[dict[str, int]] = {ELIGIBLE: 0}
_name_hashes: Final = array("Q")  # hashes of the first `_device_names`, computed on demand
_LOCK: Final = threading.Lock()


def _assign_number(name: str, numbers: dict[str, int], names: list[str]) -> int:
    if (number := numbers.get(name)) is None:
        with _LOCK:
            number = numbers.setdefault(name, len(names))
            if number == len(names):
                names.append(name)
    return number


def find_rows(devices: Iterable[str]) -> list[int]:
    """Return the row of each device. Unknown devices get new rows."""
    return [_assign_number(device, _row_by_device, _device_names) for device in devices]


def device_names(rows: Iterable[int]) -> list[str]:
    return [_device_names[row] for row in rows]


def name_hashes(rows: np.ndarray) -> np.ndarray:
    """Return the `hash_name` of the devices in these rows, as uint64 (n,)."""
    import numpy as np

    with _LOCK:
        _name_hashes.extend(map(hash_name, _device_names[len(_name_hashes) :]))
        return np.frombuffer(_name_hashes, np.uint64)[rows]


class DeviceColumn(Mapping[str, V], Generic[V]):
    """Immutable mapping from devices to numbers that are not negative."""

    typecode: ClassVar[str]

    def __init__(self, values: Mapping[str, V] = {}, _array: array[Any] | None = None, _count: int = 0) -> None:
        self._array, self._count = array(self.typecode) if _array is None else _array, _count
        self._sets: dict[V, DeviceSet] = {}  # cached sets by value
        for row, value in zip(find_rows(values), values.values(), strict=True):
            if row >= len(self._array):
                self._array.extend([-1] * (row + 1 - len(self._array)))
            self._count += self._array[row] < 0
            self._array[row] = self._encode(value)

    @classmethod
    def from_values(cls: type[C], values: Mapping[str, Any]) -> C:
        return values if isinstance(values, cls) else cls(values)

    def with_values(self: C, values: Mapping[str, Any]) -> C:
        return type(self)(values, self._array[:], self._count) if values else self

    def to_array(self, size: int) -> np.ndarray:
        """Return the values of the first `size` rows, with -1 for missing ones."""
        import numpy as np

        values = np.frombuffer(self._array, self.typecode)[:size]
        return (
            values if len(values) == size else np.concatenate((values, np.full(size - len(values), -1, self.typecode)))
        )

    def changed_values(
        self: C, previous: C, *, default: V | None = None, devices: DeviceSet | None = None
    ) -> dict[str, V]:
        """Return the values that differ from those in another column.

        Args:
            previous: The other column.
            devices: Devices to compare, or None for all.
            default: Value of a device that only `previous` has, or None to leave the device out.
        """
        import numpy as np

        size = max(len(self._array), len(previous._array))
        new, old = self.to_array(size), previous.to_array(size)
        if np.array_equal(new, old):
            return {}
        if default is not None:
            new = np.where((new < 0) & (old >= 0), self._encode(default), new)
        is_changed = (new != old) & (new >= 0)
        if devices is not None:
            common = min(size, len(devices.mask))
            is_changed = is_changed[:common] & devices.mask[:common]
        rows = np.flatnonzero(is_changed)
        return dict(zip(device_names(rows.tolist()), map(self._decode, new[rows].tolist()), strict=True))

    def __getitem__(self, device: str) -> V:
        row = _row_by_device[device]
        if row >= len(self._array) or self._array[row] < 0:
            raise KeyError(device)
        return self._decode(self._array[row])

    def __iter__(self) -> Iterator[str]:
        return (_device_names[row] for row, value in enumerate(self._array) if value >= 0)

    def __len__(self) -> int:
        return self._count

    def _encode(self, value: V) -> Any:
        return value

    def _decode(self, value: Any) -> V:
        return value


class RoundColumn(DeviceColumn[int]):
    typecode = "i"


class CostColumn(DeviceColumn[float]):
    typecode = "d"


class LabelColumn(DeviceColumn[str]):
    typecode = "i"

    def devices_with(self, label: str) -> DeviceSet:
        if label not in self._sets:
            self._sets[label] = DeviceSet(self.to_array(len(self._array)) == self._encode(label))
        return self._sets[label]

    def _encode(self, value: str) -> int:
        return _assign_number(value, _label_numbers, _label_names)

    def _decode(self, value: int) -> str:
        return _label_names[value]


class DeviceSet(Set[str]):
    def __init__(self, mask: np.ndarray) -> None:
        import numpy as np

        self.mask, self._count = mask, int(np.count_nonzero(mask))

    @classmethod
    def from_devices(cls, devices: Iterable[str]) -> DeviceSet:
        import numpy as np

        return devices if isinstance(devices, DeviceSet) else cls(np.zeros(0, bool)) | devices

    def __or__(self, other: Iterable[str]) -> DeviceSet:  # type: ignore[override]
        return self._change_membership(other, True)

    def __sub__(self, other: Iterable[str]) -> DeviceSet:
        return self._change_membership(other, False)

    def _change_membership(self, other: Iterable[str], included: bool) -> DeviceSet:
        import numpy as np

        rows = [row for row in find_rows(other) if (row < len(self.mask) and self.mask[row]) != included]
        if not rows:
            return self
        mask = np.zeros(max(len(self.mask), max(rows) + 1), bool)
        mask[: len(self.mask)] = self.mask
        mask[rows] = included
        return DeviceSet(mask)

    def __contains__(self, device: object) -> bool:
        row = _row_by_device.get(device, len(self.mask))  # type: ignore[call-overload]
        return row < len(self.mask) and bool(self.mask[row])

    def __iter__(self) -> Iterator[str]:
        return iter(device_names(self.mask.nonzero()[0].tolist()))

    def __len__(self) -> int:
        return self._count

    @classmethod
    def _from_iterable(cls, devices: Iterable[str]) -> set[str]:  # type: ignore[override]
        return set(devices)


MIN_DEVICES_FOR_MEDIAN: Final = 3  # devices of which the median is used
MAX_WEIGHT_RATIO: Final = 100.0  # largest weight, as a multiple of the median of the job's devices
MAX_EXAMPLES: Final = 10_000_000  # of a device, before enough devices have reported numbers


class DeviceWeights(Struct):
    """Weight (or number of examples) of each device of a job, and all weights in ascending order."""

    by_device: dict[str, float] = {}
    ascending: list[float] = []

    def set_number(self, device: str, number: float) -> None:
        if (old := self.by_device.get(device)) is not None:
            del self.ascending[bisect_left(self.ascending, old)]
        self.by_device[device] = number
        insort(self.ascending, number)

    def largest_allowed(self, device: str, limit: int | None) -> float:
        """Return the largest weight a device may claim: `limit`, or else a multiple of the others' median.

        With few other devices, the result is MAX_EXAMPLES.
        """
        if limit is not None:
            return limit
        own_number = self.by_device.get(device)
        other_count = len(self.ascending) - (own_number is not None)
        if other_count < MIN_DEVICES_FOR_MEDIAN:
            return MAX_EXAMPLES
        median_index = other_count // 2
        if own_number is not None and bisect_left(self.ascending, own_number) <= median_index:
            median_index += 1
        return min(MAX_WEIGHT_RATIO * max(self.ascending[median_index], 1.0), MAX_EXAMPLES)
