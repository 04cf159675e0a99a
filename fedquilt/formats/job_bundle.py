"""Bundle of a job on disk: `bundle.json` with metadata and file digests, and the folder `blobs`.

`fedquilt prepare` writes the bundle on the operator's machine, and the coordinator serves it. All blobs are in one
folder, named by their digests, because the external data of an ONNX graph must be in the graph's folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import BlobRef, Bundle, JobError, StoreError, WireMessage
from fedquilt.formats import checksummed_json, toml
from fedquilt.host.disk import REAL, Disk, disk_errors

RUN_KEYS: Final = ("name", "rounds", "priority", "cohort", "wire", "stop", "check", "trigger", "fleet", "compare")
"""Keys of a job that do not affect the bundle."""
PATH_KEYS: Final = ("path", "vocabulary", "weights", "classes")
"""Keys of a job, in any table, with a value that may be the path of a file or folder."""


class BundleIndex(WireMessage, frozen=True):
    meta: dict[str, Any]
    files: dict[str, BlobRef]
    version: Literal[1] = 1


def write_bundle(folder: Path, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> Bundle:
    """Write a bundle and return it. Keep undamaged blobs. Raise StoreError if the disk fails."""
    refs: dict[str, BlobRef] = {}
    try:
        REAL.make_folder(folder / "blobs")
        for name, payload in files.items():
            refs[name] = ref = BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
            path = folder / "blobs" / ref.sha256
            if not path.is_file() or REAL.hash_file(path) != ref.sha256:
                REAL.write_atomically(path, payload, durable=False)
        index = checksummed_json.encode_with_checksum(BundleIndex(meta=dict(meta), files=refs))
        REAL.write_atomically(folder / "bundle.json", index, durable=False)
    except OSError as error:
        raise StoreError(f"cannot write the bundle {folder}: {error.strerror}") from None
    return load_bundle(folder)


def load_bundle(folder: Path, disk: Disk = REAL, content: str = "") -> Bundle:
    """Return a bundle whose files are present with the right sizes.

    Raise JobError if the bundle is missing or damaged, or if its `hash_content` differs from a given `content`.
    `Bundle.load` verifies the sha256 of the file that it reads, and raises JobError too.
    """
    index_path = folder / "bundle.json"
    with disk_errors(f"read the bundle {folder}"):
        try:
            payload = disk.read(index_path)
            index = checksummed_json.decode_with_checksum(payload, BundleIndex)
        except (FileNotFoundError, NotADirectoryError):
            raise JobError(f"{folder} has no bundle: create one with `fedquilt prepare`") from None
        except (IsADirectoryError, checksummed_json.DamagedFileError) as error:
            raise JobError(f"{index_path} is damaged ({error}): run `fedquilt prepare` again") from None
        if content not in ("", hashlib.sha256(payload).hexdigest()):
            raise JobError(
                f"{folder} was prepared with other content after the start of the run: prepare it from the original "
                "job file and data and continue with `fedquilt resume`, or start a new run with `fedquilt run`"
            )
        for name, ref in index.files.items():
            info = disk.stat(folder / "blobs" / ref.sha256)
            if info is None or info.is_dir or info.size != ref.size:
                problem = f"file {name!r} ({ref.sha256[:12]}) is missing or incomplete"
                raise JobError(f"{folder}: {problem}: run `fedquilt prepare` again")
    return Bundle(index.meta, index.files, lambda name: _read_verified_tensors(folder, index.files[name], disk))


def _read_verified_tensors(folder: Path, ref: BlobRef, disk: Disk) -> dict[str, np.ndarray]:
    path = verify_file(folder, ref, disk)
    with disk_errors(f"read {path}"):
        payload = disk.read(path)
    return tensors.decode_tensors(payload)


def verify_file(folder: Path, ref: BlobRef, disk: Disk = REAL) -> Path:
    """Return the path of a bundle's file, or raise JobError if the file is missing or its sha256 differs."""
    path = folder / "blobs" / ref.sha256
    with disk_errors(f"read {path}"):
        try:
            is_damaged = disk.hash_file(path) != ref.sha256
        except FileNotFoundError:
            raise JobError(f"{path} is missing: run `fedquilt prepare` again") from None
    if is_damaged:
        raise JobError(f"{path} is damaged: run `fedquilt prepare` again")
    return path


# -- inputs of a bundle ---------------------------------------------------------------------------


class BundleInputs(msgspec.Struct, frozen=True):
    job: str  # sha256 of the job file's table
    files: dict[str, str]  # path -> digest of sizes and times


def is_current(job_file: Path, bundle: Path) -> bool:
    """Return whether a bundle exists and neither the job file nor the job's input files have changed.

    A bundle without recorded inputs was made by hand and is current. With a damaged record, a bundle is not current. A
    missing input counts as unchanged, because a bundle may be copied to another machine.
    """
    if not (bundle / "bundle.json").exists():
        return False
    try:
        recorded_inputs = msgspec.json.decode((bundle / "inputs.json").read_bytes(), type=BundleInputs)
    except OSError:
        return True
    except msgspec.DecodeError:
        return False
    is_unchanged = all(_stamp_input(Path(file)) in ("", stamp) for file, stamp in recorded_inputs.files.items())
    return is_unchanged and recorded_inputs.job == _hash_job(job_file)


def stamp_inputs(job_file: Path, job: Mapping[str, Any]) -> BundleInputs:
    """Return digests that change with the job file, or with the size or time of any file that it names.

    Call this before the preparation reads the files, so that a change during the preparation is detected.
    """
    return BundleInputs(_hash_job(job_file), {file: _stamp_input(Path(file)) for file in sorted(set(_list_paths(job)))})


def record_inputs(inputs: BundleInputs, bundle: Path) -> None:
    """Record `inputs` in the bundle's folder, and input files that the preparation has created."""
    files = {file: stamp or _stamp_input(Path(file)) for file, stamp in inputs.files.items()}
    inputs = BundleInputs(inputs.job, {file: stamp for file, stamp in files.items() if stamp})
    with disk_errors(f"write {bundle / 'inputs.json'}"):
        REAL.write_atomically(bundle / "inputs.json", msgspec.json.encode(inputs), durable=False)


def hash_content(bundle: Path) -> str:
    """Return the sha256 of a bundle's index, which contains the digests of all files, or "" if unreadable."""
    with suppress(OSError):
        return hashlib.sha256((bundle / "bundle.json").read_bytes()).hexdigest()
    return ""


def _hash_job(path: Path) -> str:
    table = {key: value for key, value in toml.read_toml(path).items() if key not in RUN_KEYS}
    return hashlib.sha256(msgspec.json.encode(table, order="sorted")).hexdigest()


def _list_paths(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _list_paths(item, name)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _list_paths(item)
    elif isinstance(value, str) and key in PATH_KEYS and value.startswith("/"):
        yield value


def _stamp_input(path: Path) -> str:
    """Return a digest of sizes and times of a file or of all files in a folder, or "" if missing or empty."""
    digest = hashlib.sha256()
    with disk_errors(f"read {path}"):
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
        else:
            files = [path] if path.is_file() else []
        for file in files:
            info = file.stat()
            line = f"{file.relative_to(path)} {info.st_size} {info.st_mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest() if files else ""
