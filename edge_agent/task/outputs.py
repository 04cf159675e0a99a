"""Files that a task's process leaves in its output folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fedquilt.core import BlobRef
from fedquilt.disk import REAL, doing

if TYPE_CHECKING:
    from fedquilt.core import Tensors

PRIVATE: Final = "private.safetensors"  # the private state that a round leaves
SMALL_BYTES: Final = 1 << 20  # bytes of tensors encoded as a whole before they are written


def write_tensors(path: Path | str, tensors: Tensors) -> BlobRef:
    """Write a safetensors file and return its reference. For the task's process: this imports numpy.

    Large ones are written piece by piece: beside the tensors, the whole would be a second copy in memory.

    Raises:
        StoreError: it cannot be written.
    """
    from fedquilt.tensor_files import write
    from fedquilt.tensors import encode, total_bytes

    if total_bytes([tensors]) <= SMALL_BYTES:
        payload = encode(tensors)
        with doing(f"write {path}"):
            REAL.write(path, payload)
        return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
    with doing(f"write {path}"):
        write(Path(path), tensors)
        return BlobRef(sha256=REAL.digest(path), size=os.stat(path).st_size)
