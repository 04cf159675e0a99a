"""Export of a run's result to files for other programs and for devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.blobs.chunks import ref_from_bytes
from fedquilt.console import units
from fedquilt.coordinator.rounds.events import JobStarted, RoundCommitted
from fedquilt.coordinator.storage.store import Store, StoredJob
from fedquilt.coordinator.updates.tasks import make_task
from fedquilt.core import Artefact, BlobRef, DeviceView, JobError, Method, ModelError, StoreError, TaskSpec, evaluation
from fedquilt.formats import job_bundle, personal_models
from fedquilt.onnx import graph_check, weights
from fedquilt.onnx.graph_check import CheckedGraph


def load_result(store: Store, run: str, *, best: bool = False, candidate: int | None = None) -> Artefact:
    """Return the result of a run after its last committed round, or after the round with the best evaluation.

    With `candidate`, return the candidate with this number instead of the chosen one.
    """
    row = store.find_job(run)
    state, method = load_state(store, row, best=best), methods.load(row.job.method)
    if candidate is None:
        return method.result(state)
    if method.candidate is None:
        raise JobError(f"candidate {candidate}: a run of {row.job.method} has one result: leave out the number")
    return method.candidate(state, candidate)


def load_state(store: Store, row: StoredJob, *, best: bool = False) -> Any:
    """Return the method state of a run after its last committed round, or after the round with the best evaluation."""
    latest, evaluated, _ = _find_states(store, row)
    ref = evaluated if best else latest
    if latest is None:
        raise JobError(f"{row.id} is {row.status} and has no state yet")
    if ref is None:
        raise JobError(
            f"{row.id} has no evaluation by devices yet, and thus no best state: leave --best out, and set [check] "
            "every = 1 in later jobs"
        )
    path = store.blob_store.blob_path(ref.sha256)
    if path is None:
        raise StoreError(f"the state of {row.id} ({ref.sha256[:12]}) is gone from {store.home}, or damaged")
    try:
        return tensors.unpack_state(path.read_bytes(), methods.load(row.job.method).state)
    except StoreError as error:
        if row.bundle.parent.name == "sites":
            above = "its result is at the coordinator above, which has all sites"
            raise JobError(f"{row.id} is a round of a site, {store.home}: {above}") from None
        raise StoreError(
            f"the state of {row.id} cannot be read ({error}): use the version that ran it, or run the job anew"
        ) from None


def _find_states(store: Store, row: StoredJob) -> tuple[BlobRef | None, BlobRef | None, int]:
    latest: BlobRef | None = None
    best, before, rounds = latest, 0, 0
    for _, _, fact in store.read_events(row.id):
        if isinstance(fact, RoundCommitted):
            best, before = (latest, rounds) if fact.best else (best, before)
            rounds += not fact.is_evaluation_round
        if isinstance(fact, JobStarted | RoundCommitted):
            latest = fact.state
    return latest, best, before


def export_result(store: Store, run: str, out: Path, *, best: bool = False, candidate: int | None = None) -> str:
    """Write the result of a run to a file, and return a sentence that describes the file.

    A stitched network becomes one ONNX file. Trained weights become a safetensors file with the network's table in
    the header, or an ONNX file if `out` ends with .onnx. With `best` the result is that after the round with the best
    evaluation. The sentence states if the run has not ended.
    """
    found, row = load_result(store, run, best=best, candidate=candidate), store.find_job(run)
    endings = (".onnx",) if found.kind == "stitched" else (".onnx", ".safetensors")
    if out.suffix and out.suffix not in endings:
        what = "a stitched network is one ONNX file" if found.kind == "stitched" else "weights are safetensors or ONNX"
        raise JobError(f"{out}: {what}: name a file that ends with {' or '.join(endings)}")
    payload, what = _encode_result(found, row, onnx=out.suffix == ".onnx")
    part = out.with_name(out.name + ".part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():
            out.write_bytes(payload)  # a device or a pipe: written to, never replaced
        else:
            part.write_bytes(payload)
            os.replace(part, out)
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror}") from None
    if best:
        what = f"{what}, after {_find_states(store, row)[2]} rounds, the best that devices evaluated"
    return f"{out}: {units.format_bytes(len(payload))}, {what}{_describe_unfinished(store, row)}"


def encode_for_devices(store: Store, run: str) -> tuple[bytes, str]:
    """Return the result of a run as bytes for devices, and a description.

    The bytes are an ONNX file, or `fedquilt.formats.personal_models` data if each device has a private part of the
    network.
    """
    row = store.find_job(run)
    state, method = load_state(store, row), methods.load(row.job.method)
    if (status := store.current_status(row)) != "done":
        raise JobError(
            f"{row.id} is {status}, so that it has no result yet: `fedquilt resume {row.id}` goes on with it"
        )
    found = method.result(state)
    split = method.personal is not None and found.meta.get("private") != []
    if (private := found.meta.get("private")) and not split:
        raise JobError(
            f"{row.job.method} leaves {len(private)} tensors ({private[0]}, ...) on each board, and does not say how "
            "a board puts its network together of them (`Method.personal`): roll out a run of another method, or a "
            "FILE.onnx"
        )
    if split:
        from fedquilt.models.networks import onnx_file  # needs torch

        graph = onnx_file.export_without_weights(found.meta["network"], _reading_settings(row))
        order = method.send(state, DeviceView("", None))
        assert order is not None, f"{row.job.method} orders nothing of a new device"
        kept = f"what it has kept of {row.id}"
        what = f"network {found.meta['network'].get('name')}, in which each board puts {kept}"
    else:
        graph, what = _encode_result(found, row, onnx=True)
        order = TaskSpec({}, {})
    shares = None
    if row.job.personal.prior == "auto":
        graph, shares = _add_unfilled_class_priors(graph), _last_class_shares(store, row, method)
        what = f"{what}, to whose scores each board adds its class priors"
    zeros = {name: np.zeros(lack.shape, lack.dtype) for name, lack in weights.missing_tensors(graph).items()}
    require_loadable(b"".join(weights.fill_graph(graph, zeros)) if zeros else graph, what)
    return (_encode_shared_parts(row, method, order, graph, shares) if zeros else graph), what


def _add_unfilled_class_priors(graph: bytes) -> bytes:
    import onnx  # which a coordinator does not need

    model = onnx.load_from_string(graph)
    (output,) = model.graph.output
    added = onnx.TensorProto(name=personal_models.CLASS_PRIORS, data_type=onnx.TensorProto.FLOAT)
    added.dims.append(output.type.tensor_type.shape.dim[1].dim_value)
    model.graph.initializer.append(added)
    node = onnx.helper.make_node("Add", [output.name, added.name], [f"{output.name}_with_{added.name}"])
    model.graph.node.append(node)
    output.name = node.output[0]
    found: bytes = model.SerializeToString(deterministic=True)
    return found


def _last_class_shares(store: Store, row: StoredJob, method: Method) -> tuple[float, ...]:
    """Return the class shares of the run's last evaluation, or () for equal ones."""
    found = [fact.evaluation for _, _, fact in store.read_events(row.id) if isinstance(fact, RoundCommitted)]
    known = [] if method.traits.equal_classes else [sums for sums in found if sums is not None]
    return evaluation.class_shares(evaluation.count_classes(known[-1])) if known else ()


def require_loadable(payload: bytes | memoryview, what: str, input_shape: Sequence[int] | None = None) -> CheckedGraph:
    """Check an ONNX file as a device does before loading, and return the checked graph."""
    try:
        found = graph_check.check_bytes(payload)
        found.require_batched_examples()
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from None
    output = found.outputs[0]
    if output.shape is not None and len(output.shape) != 2:
        raise ModelError(
            f"{what}: output {output.name[:80]!r} has the shape {graph_check.format_shape(output.shape)}, not the axes "
            "(examples, classes): export a network that ends with scores of classes"
        )
    name, declared = found.inputs[0].name[:80], found.input_shape
    if input_shape is None and declared is None:
        raise ModelError(f"{what}: input {name!r} declares no number of axes: add --input-shape, such as 3,224,224")
    if input_shape is not None and not graph_check.fits_shape(input_shape, declared):
        raise ModelError(
            f"{what}: --input-shape {','.join(map(str, input_shape))} is not what input {name!r} declares, examples of "
            f"shape {graph_check.format_shape(declared)}"
        )
    return found


def _encode_shared_parts(
    row: StoredJob, method: Method, order: TaskSpec, graph: bytes, class_shares: tuple[float, ...] | None
) -> bytes:
    sent = {name: value for name, value in order.bundles.items() if not isinstance(value, BlobRef)}
    task = make_task(
        order,
        store_bundle=lambda value: (
            value if isinstance(value, BlobRef) else ref_from_bytes(tensors.encode_tensors(value))
        ),
        actions=("check",),
        engine=method.engines[0],
        job=row.id,
        round=0,
        attempt=0,
        method=row.job.method,
        seed=row.job.seed,
        deadline_s=0.0,
        class_shares=class_shares,
    )
    return personal_models.encode_personal(task, graph, sent)


def _encode_result(found: Artefact, row: StoredJob, *, onnx: bool) -> tuple[bytes, str]:
    if found.kind == "stitched":
        from fedquilt.models.stitching import stitched_network
        from fedquilt.models.stitching.onnx import export  # needs onnx, which a coordinator does not

        index = job_bundle.load_bundle(row.bundle, content=row.content)
        files = {name: job_bundle.verify_file(row.bundle, ref) for name, ref in index.files.items()}
        payload = export.export_stitched(
            found.meta,
            found.tensors,
            stitched_network.load_donor_pool(index.meta).blocks,
            files,
            _reading_settings(row),
        )
        what = f"{stitched_network.artefact_name(found.meta)}, labels {', '.join(found.meta['labels'])}"
    elif onnx:
        if found.kind != "weights":
            raise ModelError(
                f"a result of the kind {found.kind!r} has no ONNX: `fedquilt model export` writes it as .safetensors"
            )
        from fedquilt.models.networks import onnx_file  # needs torch

        payload = onnx_file.export_network(found.meta["network"], found.tensors, _reading_settings(row))
        what = f"network {found.meta['network'].get('name')}"
    else:
        payload = tensors.encode_tensors(found.tensors, {"fedquilt": msgspec.json.encode(found.meta).decode()})
        name = found.meta.get("network", {}).get("name") if isinstance(found.meta.get("network"), dict) else None
        what = f"{len(found.tensors)} tensors" + (f" of network {name}" if name else f" ({found.kind})")
    return payload, what


def _reading_settings(row: StoredJob) -> Mapping[str, Any]:
    found: Mapping[str, Any] = job_bundle.load_bundle(row.bundle).meta.get("reading", {})
    return found


def _describe_unfinished(store: Store, row: StoredJob) -> str:
    if (status := store.current_status(row)) == "done":
        return ""
    rounds = sum(
        isinstance(fact, RoundCommitted) and not fact.is_evaluation_round for _, _, fact in store.read_events(row.id)
    )
    return f"; no final result: {row.id} is {status}, after {rounds} of at most {row.job.rounds} rounds"
