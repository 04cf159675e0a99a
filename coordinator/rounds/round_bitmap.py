"""Set of round numbers as a bitmap: 10,000 rounds need 1.3 kB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class RoundBitmap(Sequence[int]):
    """Immutable sequence of round numbers in ascending order, stored as a bitmap.

    Args:
        bits: Integer whose bit r is set if round r is included.
    """

    __slots__ = ("_bits",)

    def __init__(self, bits: int = 0) -> None:
        self._bits = bits

    @staticmethod
    def from_bytes(packed: bytes) -> RoundBitmap:
        return RoundBitmap(int.from_bytes(packed, "little"))

    def to_bytes(self) -> bytes:
        """Return the bitmap as bytes, with round 0 in the lowest bit of the first byte."""
        return self._bits.to_bytes((self._bits.bit_length() + 7) // 8, "little")

    def with_round(self, round: int) -> RoundBitmap:
        return RoundBitmap(self._bits | 1 << round)

    def rounds_before(self, round: int) -> RoundBitmap:
        return RoundBitmap(self._bits & (1 << round) - 1)

    @property
    def last_round(self) -> int | None:
        """Highest round number, or None if the bitmap is empty."""
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
        return f"Contributed({list(self)})"


NEVER = RoundBitmap()
