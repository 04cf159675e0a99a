"""Trees of files like a board's `/proc` and `/sys`, for tests of sensors: `plant` makes one."""

from fedquilt.profiles.layouts import BOARDS
from fedquilt.profiles.planted import plant

__all__ = ["BOARDS", "plant"]
