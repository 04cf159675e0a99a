"""Rounds that a device contributed to, a bit for each: 10,000 rounds take 1.3 kB, and a question takes no search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class Contributed(Sequence[int]):
    """Numbers of rounds, ascending. A value: `plus` returns another one.

    Args:
        bits: bit r is set if round r is one of them.
    """

    __slots__ = ("_bits",)

    def __init__(self, bits: int = 0) -> None:
        self._bits = bits

    @staticmethod
    def unpack(packed: bytes) -> Contributed:
        """Rounds from the bytes that `packed` returned."""
        return Contributed(int.from_bytes(packed, "little"))

    def packed(self) -> bytes:
        """The bits, the first round's lowest in the first byte."""
        return self._bits.to_bytes((self._bits.bit_length() + 7) // 8, "little")

    def plus(self, round: int) -> Contributed:
        """These rounds and one more."""
        return Contributed(self._bits | 1 << round)

    def before(self, round: int) -> Contributed:
        """Those of these rounds that came before one."""
        return Contributed(self._bits & (1 << round) - 1)

    @property
    def last(self) -> int | None:
        """The highest number; None: there is none."""
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
        return isinstance(other, Contributed) and self._bits == other._bits

    def __hash__(self) -> int:
        return hash(self._bits)

    def __repr__(self) -> str:
        return f"Contributed({list(self)})"


NEVER = Contributed()
