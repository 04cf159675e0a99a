"""Trees of files that stand for a board's `/proc` and `/sys`, for people who write sensors: `plant` makes one."""

from fedquilt.profiles.layouts import BOARDS
from fedquilt.profiles.planted import plant

__all__ = ["BOARDS", "plant"]
