"""Trees of files such as a board's `/proc` and `/sys`, made by `plant` for tests of sensors."""

from fedquilt.profiles.board_layouts import BOARDS
from fedquilt.profiles.fake_trees import write_fake_board

__all__ = ["BOARDS", "write_fake_board"]
