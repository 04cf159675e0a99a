"""Finished runs in a folder, each in a file named by all that it depends on: an interrupted comparison goes on."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from fedquilt.core import StoreError

T = TypeVar("T")


class Kept(Generic[T]):
    """Runs of one type, in `folder`/runs.

    Raises:
        StoreError: the folder cannot be made.
    """

    def __init__(self, folder: Path, kind: type[T]) -> None:
        self.folder, self._kind = folder / "runs", kind
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot write {self.folder}: {error.strerror}") from None

    def find(self, key: str) -> T | None:
        """None: there is no such run, or not one of this version."""
        try:
            return msgspec.json.decode((self.folder / f"{key}.json").read_bytes(), type=self._kind)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def keep(self, key: str, run: T) -> None:
        part = self.folder / f"{key}.part"
        part.write_bytes(msgspec.json.format(msgspec.json.encode(run)))
        os.replace(part, self.folder / f"{key}.json")


def key(*parts: bytes, bundle: Path) -> str:
    """What a run depends on, as a file's name: the parts, and what is in its bundle."""
    index = (bundle / "bundle.json").read_bytes()
    return hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in (*parts, index))).hexdigest()[:24]
