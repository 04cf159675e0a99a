"""Trees of files such as a board's `/proc` and `/sys`, made by `plant` for tests of sensors."""

from fedquilt.profiles.layouts import BOARDS
from fedquilt.profiles.planted import write_fake_board

__all__ = ["BOARDS", "write_fake_board"]
