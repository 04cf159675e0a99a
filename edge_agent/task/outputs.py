"""Files that a task's process leaves in its output folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fedquilt.core import BlobRef
from fedquilt.host.disk import REAL, disk_errors

if TYPE_CHECKING:
    from fedquilt.core import Tensors

PRIVATE: Final = "private.safetensors"  # the private state that a round leaves
SMALL_BYTES: Final = 1 << 20  # bytes of tensors encoded as a whole before they are written


def write_tensors(path: Path | str, tensors: Tensors) -> BlobRef:
    """Write a safetensors file and return its reference.

    Large files are written in pieces, because a whole encoding would be a second copy in memory. Imports numpy.

    Raises:
        StoreError: If the file cannot be written.
    """
    from fedquilt.arrays.disk_arrays import write_safetensors
    from fedquilt.arrays.tensors import encode_tensors, total_bytes

    if total_bytes([tensors]) <= SMALL_BYTES:
        payload = encode_tensors(tensors)
        with disk_errors(f"write {path}"):
            REAL.write(path, payload)
        return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
    with disk_errors(f"write {path}"):
        write_safetensors(Path(path), tensors)
        return BlobRef(sha256=REAL.hash_file(path), size=os.stat(path).st_size)
