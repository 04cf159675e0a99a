"""Bundle of a job on disk: `bundle.json` (facts, and files by name) beside `blobs/` (files by sha256).

`fedquilt prepare` writes one on the operator's machine; the coordinator only serves it. Blobs lie
flat under their digests, so an ONNX graph finds its external data wherever both have been put.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedquilt import checked, tensors
from fedquilt.core import BlobRef, Bundle, JobError, StoreError, Wired
from fedquilt.disk import REAL


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


def load(folder: Path) -> Bundle:
    """Open a bundle. Files are checked for presence and size now, for content when they are read or stored.

    Raises:
        JobError: there is no bundle, or it is damaged; says how to make one.
    """
    try:
        index = checked.decode((folder / "bundle.json").read_bytes(), Index)
    except FileNotFoundError:
        raise JobError(f"no bundle in {folder}: make it with `fedquilt prepare`") from None
    except (OSError, checked.DamagedFileError) as error:
        raise JobError(f"{folder / 'bundle.json'} is damaged ({error}): make it anew with `fedquilt prepare`") from None
    for name, ref in index.files.items():
        path = folder / "blobs" / ref.sha256
        if not path.is_file() or path.stat().st_size != ref.size:
            raise JobError(f"{folder}: file {name!r} ({ref.sha256[:12]}) is missing or cut short: prepare it anew")
    return Bundle(index.meta, index.files, lambda name: tensors.read(file(folder, index.files[name])))


def file(folder: Path, ref: BlobRef) -> Path:
    """A file of a bundle, whose content has been compared with its name.

    Raises:
        JobError: it is gone or damaged.
    """
    path = folder / "blobs" / ref.sha256
    try:
        damaged = REAL.digest(path) != ref.sha256
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}; make the bundle anew with `fedquilt prepare`") from None
    if damaged:
        raise JobError(f"{path} is damaged: make the bundle anew with `fedquilt prepare`")
    return path


def _replace(path: Path, payload: bytes) -> None:
    REAL.put(path, payload, durable=False)
