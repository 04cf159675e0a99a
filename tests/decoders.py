"""Every decoder of both sides: where it is, valid inputs of it, and the errors that it may raise."""

from __future__ import annotations

from pathlib import Path

import decoders_boards
import decoders_files
import decoders_processes
import decoders_runner
import decoders_sent
from decoding import Decoder


def every(folder: Path) -> dict[str, Decoder]:
    """All decoders by name.

    Args:
        folder: for files of theirs, empty.
    """
    sent, files = folder / "sent", folder / "files"
    sent.mkdir()
    files.mkdir()
    runner, boards = decoders_runner.every(folder / "runner"), decoders_boards.every(folder / "boards")
    processes = decoders_processes.every(folder / "processes")
    return {**decoders_sent.every(sent), **decoders_files.every(files), **processes, **runner, **boards}
