"""Bundle of a job on disk: `bundle.json` (facts, and files by name) beside `blobs/` (files by sha256).

`fedquilt prepare` writes one on the operator's machine; the coordinator only serves it. Blobs lie
flat under their digests, so an ONNX graph finds its external data wherever both have been put.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedquilt import checked, tensors
from fedquilt.core import BlobRef, Bundle, JobError, StoreError, Wired
from fedquilt.disk import REAL, Disk, doing


class Index(Wired, frozen=True):
    """Content of bundle.json."""

    meta: dict[str, Any]
    files: dict[str, BlobRef]
    version: Literal[1] = 1


def write(folder: Path, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> Bundle:
    """Write a bundle; files that are there already (by content) are kept.

    Raises:
        StoreError: the folder cannot be written.
    """
    refs: dict[str, BlobRef] = {}
    try:
        REAL.make(folder / "blobs")
        for name, payload in files.items():
            refs[name] = ref = BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
            path = folder / "blobs" / ref.sha256
            if not path.is_file() or REAL.digest(path) != ref.sha256:
                _replace(path, payload)
        _replace(folder / "bundle.json", checked.encode(Index(meta=dict(meta), files=refs)))
    except OSError as error:
        raise StoreError(f"cannot write the bundle {folder}: {error.strerror}") from None
    return load(folder)


def load(folder: Path, disk: Disk = REAL) -> Bundle:
    """Open a bundle. Files are checked for presence and size now, for content when they are read or stored.

    Args:
        folder: with the bundle.
        disk: where that is.

    Raises:
        JobError: there is no bundle, or it is damaged; says how to make one. So does reading one of its files.
        StoreError: it cannot be read. So does reading one of its files.
    """
    index_at = folder / "bundle.json"
    with doing(f"read the bundle {folder}"):
        try:
            index = checked.decode(disk.read(index_at), Index)
        except (FileNotFoundError, NotADirectoryError):
            raise JobError(f"no bundle in {folder}: make it with `fedquilt prepare`") from None
        except (IsADirectoryError, checked.DamagedFileError) as error:
            raise JobError(f"{index_at} is damaged ({error}): make it anew with `fedquilt prepare`") from None
        for name, ref in index.files.items():
            found = disk.stat(folder / "blobs" / ref.sha256)
            if found is None or found.is_dir or found.size != ref.size:
                raise JobError(f"{folder}: file {name!r} ({ref.sha256[:12]}) is missing or cut short: prepare it anew")
    return Bundle(index.meta, index.files, lambda name: _tensors(folder, index.files[name], disk))


def _tensors(folder: Path, ref: BlobRef, disk: Disk) -> dict[str, np.ndarray]:
    path = file(folder, ref, disk)
    with doing(f"read {path}"):
        payload = disk.read(path)
    return tensors.decode(payload)


def file(folder: Path, ref: BlobRef, disk: Disk = REAL) -> Path:
    """A file of a bundle, whose content has been compared with its name.

    Raises:
        JobError: it is gone or damaged.
        StoreError: it cannot be read.
    """
    path = folder / "blobs" / ref.sha256
    with doing(f"read {path}"):
        try:
            damaged = disk.digest(path) != ref.sha256
        except FileNotFoundError:
            raise JobError(f"{path} is gone: make the bundle anew with `fedquilt prepare`") from None
    if damaged:
        raise JobError(f"{path} is damaged: make the bundle anew with `fedquilt prepare`")
    return path


def _replace(path: Path, payload: bytes) -> None:
    REAL.put(path, payload, durable=False)
