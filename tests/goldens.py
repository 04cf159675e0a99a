"""Golden runs: six methods through the simulated fleet on virtual time, and what came of them, kept in golden.json.

    python -m tests.goldens            # compare this checkout with what is kept
    python -m tests.goldens --write    # keep what this checkout does, and say what moved

Kept of each run: the devices asked in every round, the sha256 of the state after every round, and the sha256 of the
exported file. The last bits of a product of matrices depend on the processor, so the file also holds a probe (the
bits that a few small products have where it was written) and sums of all values. Where the probe gives the same
bits, the runs must too; elsewhere the sums must agree to 1e-5. The devices asked are the same everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import platform
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import safetensors.numpy

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import CohortSelected, JobStarted, RoundCommitted
from fedquilt.coordinator.storage.store import Store
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle
from fedquilt.tools.artefacts import export
from fedquilt.tools.lab import demo
from fedquilt.tools.simulation import agents

FILE = Path(__file__).parent / "simulation" / "golden.json"
DEMO = Path(demo.__file__).parent
TOLERANCE = 1e-5  # of the sum of all magnitudes
NETWORK = {"name": "mlp", "inputs": 64, "hidden": [16], "classes": 10}
TABLE: dict[str, Any] = {
    "name": "golden",
    "rounds": 4,
    "seed": 3,
    "engine": "numpy",
    "params": {"lr": 0.2, "batch": 16},
    "cohort": {"size": 3},
    "check": {"every": 2},
    "fleet": {"devices": 5, "boards": ["jetson-nano", "jetson-tx2"], "budgets": ["256MB", "512MB"]},
    "data": {"path": str(DEMO / "digits.npz"), "partition": "dirichlet", "alpha": 1.0},
}
CHANGES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"wire": {"codec": "int8"}},
    "scaffold": {},
    "fednova": {"params": {"lr": 0.2, "batch": 16, "epochs": 2, "momentum": 0.9}},
    "fedrep": {"params": {"lr": 0.2, "batch": 16, "head_epochs": 2}},
    "fedstitch": {},
}
STITCHING = {  # over the demo's own job: a search of a few rounds
    "name": "golden",
    "seed": 3,
    "cohort": {"size": 4},
    "params": {"expansions": 4, "k": 2, "depth": 4, "subrounds": 1, "samples": 32, "finalists": 2},
}


class Values(msgspec.Struct, frozen=True):
    count: int
    magnitudes: float  # sum of |x|
    total: float
    waved: float  # sum of cos(index) * x: another order of the same numbers gives another one

    def near(self, other: Values) -> bool:
        most = TOLERANCE * max(self.magnitudes, other.magnitudes, 1.0)
        pairs = zip(msgspec.structs.astuple(self)[1:], msgspec.structs.astuple(other)[1:], strict=True)
        return self.count == other.count and all(abs(a - b) <= most for a, b in pairs)


class Content(msgspec.Struct, frozen=True):
    sha256: str
    values: Values


class Golden(msgspec.Struct, frozen=True):
    asked: list[list[str]]  # of each time that devices were asked; a closing evaluation too
    states: list[Content]  # the first, and that after each round
    exported: Content


class File(msgspec.Struct, frozen=True):
    probes: dict[str, str]  # method -> the bits of what its arithmetic consists of
    written_on: str  # for the reader: processor and versions
    runs: dict[str, Golden]


def play(method: str, folder: Path) -> Golden:
    job, stock = _job(method, folder)
    plan = agents.FleetPlan(job, stock, folder / "runs")
    asked: list[list[str]] = []
    states: list[Content] = []
    append = Store.append_event

    def watched(store: Store, run: str, event: Any) -> None:
        append(store, run, event)
        if isinstance(event, CohortSelected):
            asked.append(list(event.devices))
        if isinstance(
            event, JobStarted | RoundCommitted
        ):  # read at once: the store drops a state once there is a newer one
            path = store.blob_store.blob_path(event.state.sha256)
            assert path is not None, f"{method}: a state is recorded that is not on disk"
            states.append(content(path.read_bytes(), "state"))

    with mock.patch.object(Store, "append_event", watched), contextlib.redirect_stdout(io.StringIO()):
        run, status = agents.run_fleet_virtually(plan)
    assert status == "done", f"{method}: the run ended as {status}"
    out = folder / ("stitched.onnx" if method == "fedstitch" else "weights.safetensors")
    with Store(plan.home) as store:
        export.export_result(store, run, out)
    return Golden(asked, states, content(out.read_bytes(), out.suffix))


def _job(method: str, folder: Path) -> tuple[settings.JobSettings, Path]:
    if method == "fedstitch":
        whole = msgspec.to_builtins(settings.load_job(DEMO / "job.toml"))
        changed = {
            key: {**whole[key], **value} if isinstance(value, dict) else value for key, value in STITCHING.items()
        }
        return settings.parse_job({**whole, **changed}), DEMO / "bundle"
    first = tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))
    job_bundle.write_bundle(folder / "bundle", {"network": NETWORK, "flops": 2176}, {"model": first})
    return settings.parse_job({**TABLE, "method": method, **CHANGES[method]}), folder / "bundle"


def content(payload: bytes, kind: str) -> Content:
    numbers = np.concatenate([np.ravel(array).astype(np.float64) for array in _arrays(payload, kind)] or [np.zeros(0)])
    waves = np.cos(np.arange(len(numbers)))
    sums = (float(np.abs(numbers).sum()), float(numbers.sum()), float((waves * numbers).sum()))
    return Content(hashlib.sha256(payload).hexdigest(), Values(len(numbers), *sums))


def _arrays(payload: bytes, kind: str) -> Iterator[np.ndarray]:
    if kind == ".onnx":
        import onnx
        from onnx import numpy_helper

        graph = onnx.load_from_string(payload).graph
        yield from (numpy_helper.to_array(each) for each in sorted(graph.initializer, key=lambda each: each.name))
    else:
        found = safetensors.numpy.load(payload)
        yield from (found[name] for name in sorted(found))


def probe(method: str = "") -> str:
    draws = np.random.default_rng(0)
    bits = hashlib.sha256(struct.pack("<q", int(draws.integers(2**62))))
    for rows, inner, columns in ((16, 64, 16), (16, 16, 10), (64, 16, 16), (7, 64, 16), (1, 64, 10)):
        a = draws.normal(size=(rows, inner)).astype(np.float32)
        b = draws.normal(size=(inner, columns)).astype(np.float32)
        for product in (a @ b, a.astype(np.float64) @ b, (b.T @ a.T)):
            bits.update(np.ascontiguousarray(product).tobytes())
        gram = a.T.astype(np.float64) @ a + np.eye(inner)
        bits.update(np.linalg.solve(gram, b.astype(np.float64)).tobytes())
        bits.update(np.exp(a).tobytes() + np.log(np.abs(a)).tobytes() + a.sum(axis=0).tobytes())
    if method == "fedstitch":
        for rows, columns in ((3136, 32), (12544, 16), (600, 128)):  # shared out among the threads that there are
            maps = draws.normal(size=(rows, columns)).astype(np.float32)
            bits.update((maps.T @ maps).tobytes())
        bits.update(_block())
        bits.update(_describe_processor().encode())
    return bits.hexdigest()


def _describe_processor() -> str:
    """Return family, model, cache size and flags of the first processor."""
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    kept = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags", "Features", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in kept)


def _block() -> bytes:
    import onnxruntime

    stock = job_bundle.load_bundle(DEMO / "bundle")
    name = sorted(name for name in stock.files if name.endswith(".onnx"))[0]
    session = onnxruntime.InferenceSession(str(DEMO / "bundle" / "blobs" / stock.files[name].sha256))
    given = session.get_inputs()[0]
    shape = [8, *(size if isinstance(size, int) else 28 for size in given.shape[1:])]
    noise = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return b"".join(np.asarray(each).tobytes() for each in session.run(None, {given.name: noise}))


def load() -> File:
    return msgspec.json.decode(FILE.read_bytes(), type=File)


def differences(kept: Golden, found: Golden, *, bits: bool) -> list[str]:
    said = []
    if found.asked != kept.asked:
        pairs = zip(kept.asked, found.asked, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(kept.asked), len(found.asked)))
        said.append(f"other devices are asked, from time {first} on: {kept.asked[first:]} became {found.asked[first:]}")
    if len(found.states) != len(kept.states):
        said.append(f"{len(kept.states)} states became {len(found.states)}")
    for index, (a, b) in enumerate(zip(kept.states, found.states, strict=False)):
        if moved := _moved(a, b, bits):
            said.append(f"the state after {index} rounds has {moved}, and maybe those after it")
            break
    if moved := _moved(kept.exported, found.exported, bits):
        said.append(f"the exported file has {moved}")
    return said


def _moved(kept: Content, found: Content, bits: bool) -> str:
    if not found.values.near(kept.values):
        return f"other values: {kept.values} became {found.values}"
    return f"other bytes, and the same values to {TOLERANCE:g}" if bits and found.sha256 != kept.sha256 else ""


def main() -> int:
    """Play every run; 1 when one differs from what is kept and nothing is written."""
    found = {}
    for method in CHANGES:
        with tempfile.TemporaryDirectory(prefix="fedquilt-golden-") as folder:
            found[method] = play(method, Path(folder))
    kept: Mapping[str, Golden] = load().runs if FILE.is_file() else {}
    moved = {method: differences(kept[method], run, bits=True) for method, run in found.items() if method in kept}
    for method in found:
        print(f"{method}: {'; '.join(moved.get(method, ['is new'])) or 'as kept'}")
    if "--write" not in sys.argv[1:]:
        return 1 if any(moved.values()) or kept.keys() != found.keys() else 0
    lines = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    text = msgspec.json.encode(File({method: probe(method) for method in found}, lines, found))
    FILE.write_bytes(msgspec.json.format(text, indent=1) + b"\n")
    print(f"written: {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
