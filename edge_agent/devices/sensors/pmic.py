"""Voltages and currents of a Raspberry Pi 5's power controller, from its firmware.

This is the output of `vcgencmd pmic_read_adc`, read through the firmware's mailbox /dev/vcio without a process for each
reading (github.com/raspberrypi/utils, vcgencmd). Raspberry Pi OS gives that file to the group `video`. A line is
"VDD_CORE_A current(7)=1.29000000A" or "VDD_CORE_V volt(15)=0.75000000V". The 5 V input has a voltage but no current:
USB devices and the controller's losses are not in the sum, which is below the reading of a wall plug. The sum counts as
power of processor and memory, not of the board.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fedquilt.core import Covers, Power

QUESTION: Final = "pmic_read_adc"
MAILBOX: Final = "dev/vcio"
PROPERTY: Final = 0xC0006400 | struct.calcsize("P") << 16  # _IOWR(100, 0, char *)
GENCMD: Final = 0x00030080  # tag of the firmware's commands
TEXT_BYTES: Final = 4096  # as newer versions of vcgencmd; all channels together are nearly 1024
HEAD: Final = 6  # words before the text: size, request, tag, room, length, error
LINE: Final = re.compile(r"(\w+)_([AV]) (?:current|volt)\(\d+\)=([0-9.]+)[AV]")


class Pmic:
    """Power of each rail with a voltage and a current, as a `fedquilt.core.Meter`.

    Args:
        ask: Function that returns the firmware's output for "pmic_read_adc", or None.
    """

    covers: Covers = "processor"

    def __init__(self, ask: Callable[[], str | None]) -> None:
        self._ask = ask

    def read(self, now_s: float) -> Power:
        found = {(rail, unit): float(value) for rail, unit, value in LINE.findall(self._ask() or "")}
        rails_w = {
            rail: amperes * found[rail, "V"]
            for (rail, unit), amperes in found.items()
            if unit == "A" and (rail, "V") in found
        }
        return Power(sum(rails_w.values()), "pmic", rails_w) if rails_w else Power()


def detect_pmic(root: Path) -> Pmic | None:
    """Return the meter of a Raspberry Pi 5, or None on another board or without permission."""
    meter = Pmic(lambda: run_firmware_command(root / MAILBOX, QUESTION))
    return meter if meter.read(0.0).rails_w else None


def run_firmware_command(mailbox: Path, question: str) -> str | None:
    """Return the output of a vcgencmd command, or None if the mailbox or the command fails."""
    words = array.array("I", bytes(4 * HEAD + TEXT_BYTES + 4))
    text = question.encode() + b"\0"
    words[0], words[2], words[3] = 4 * len(words), GENCMD, TEXT_BYTES
    memoryview(words).cast("B")[4 * HEAD : 4 * HEAD + len(text)] = text
    with contextlib.suppress(OSError):
        file = os.open(mailbox, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(file, PROPERTY, words)
        finally:
            os.close(file)
        if words[5] == 0:
            return words.tobytes()[4 * HEAD :].split(b"\0")[0].decode(errors="replace")
    return None
