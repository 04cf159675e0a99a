"""Export of a run's result to files for other programs and for devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.blobs.chunks import ref_from_bytes
from fedquilt.console import units
from fedquilt.coordinator.rounds.events import JobStarted, RoundCommitted
from fedquilt.coordinator.rounds.job_state import JobConstants, JobState, apply_event
from fedquilt.coordinator.storage.store import Store, StoredJob
from fedquilt.coordinator.updates.tasks import make_task
from fedquilt.core import Artefact, BlobRef, DeviceView, JobError, Method, ModelError, StoreError, TaskSpec, evaluation
from fedquilt.formats import job_bundle, personal_models
from fedquilt.onnx import graph_check, weights


def load_result(store: Store, run: str, *, best: bool = False, candidate: int | None = None) -> Artefact:
    """Return a run's result after its last committed round, or after the round with the best evaluation.

    With `candidate`, return the candidate with this number instead of the chosen one. Raise JobError without a result.
    """
    row = store.find_job(run)
    state, method = load_state(store, row, best=best).value, methods.load(row.job.method)
    if candidate is None:
        return method.result(state)
    if method.candidate is None:
        raise JobError(f"candidate {candidate}: a run of {row.job.method} has one result: leave out the number")
    return method.candidate(state, candidate)


class FoundState(NamedTuple):
    value: Any
    rounds: int  # that led to the state
    sha256: str


def load_state(store: Store, row: StoredJob, *, best: bool = False) -> FoundState:
    """Return the state after the last committed round, or after the round with the best evaluation by devices."""
    latest, evaluated, rounds, best_rounds = _find_states(store, row)
    ref = evaluated if best else latest
    if latest is None:
        raise JobError(f"{row.id} is {row.status} and has no state yet: wait until its first round starts")
    if ref is None:
        raise JobError(
            f"{row.id} has no evaluation by devices yet, and thus no best state: leave --best out, and set [check] "
            "every = 1 in later jobs"
        )
    path = store.blob_store.blob_path(ref.sha256)
    if path is None:
        raise StoreError(f"the state of {row.id} ({ref.sha256[:12]}) is missing or damaged: restore {store.home}")
    try:
        value: Any = tensors.unpack_state(path.read_bytes(), methods.load(row.job.method).state)
        return FoundState(value, best_rounds if best else rounds, ref.sha256)
    except StoreError as error:
        if row.bundle.parent.name == "sites":
            raise JobError(f"{row.id} is a site's round ({store.home}): export at the parent coordinator") from None
        raise StoreError(
            f"the state of {row.id} cannot be read ({error}): use the version that ran it, or run the job again"
        ) from None


def _find_states(store: Store, row: StoredJob) -> tuple[BlobRef | None, BlobRef | None, int, int]:
    """Return the latest state, the best evaluated state, and the number of rounds that led to each."""
    latest_state: BlobRef | None = None
    best_state, rounds, best_rounds = latest_state, 0, 0
    job_state = JobState(JobConstants.from_job(row.job))
    for _, _, event in store.read_events(row.id):
        job_state = apply_event(job_state, event, 0.0)
        if isinstance(event, RoundCommitted) and event.best:
            best_state, best_rounds = latest_state, rounds
        if isinstance(event, JobStarted | RoundCommitted) and not job_state.is_final_evaluation_done:
            latest_state, rounds = event.state, job_state.completed_rounds
    return latest_state, best_state, rounds, best_rounds


def export_result(store: Store, run: str, out: Path, *, best: bool = False, candidate: int | None = None) -> str:
    """Write the result of a run to a file, and return a sentence that describes the file.

    A stitched network becomes one ONNX file. Trained weights become a safetensors file with the network's table in
    the header, or an ONNX file if `out` ends with .onnx. With `best` it is the result after the round with the best
    evaluation. The sentence says if the run has not ended. Raise JobError without a result.
    """
    artefact, row = load_result(store, run, best=best, candidate=candidate), store.find_job(run)
    suffixes = (".onnx",) if artefact.kind == "stitched" else (".onnx", ".safetensors")
    if out.suffix and out.suffix not in suffixes:
        label = (
            "a stitched network is one ONNX file" if artefact.kind == "stitched" else "weights are safetensors or ONNX"
        )
        raise JobError(f"{out}: {label}: name a file that ends with {' or '.join(suffixes)}")
    payload, label = _encode_result(artefact, row, onnx=out.suffix == ".onnx")
    temporary = out.with_name(out.name + ".part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():
            out.write_bytes(payload)  # device files and pipes cannot be replaced
        else:
            temporary.write_bytes(payload)
            os.replace(temporary, out)
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror}") from None
    if best:
        label = f"{label}, after {_find_states(store, row)[3]} rounds, the best that devices evaluated"
    if untrained := artefact.tensors.keys() & set(artefact.untrained_tensors):
        label = f"{label}, {len(untrained)} of {len(artefact.tensors)} tensors untrained: {row.job.method} leaves the"
        label = f"{label} trained ones on devices"
    return f"{out}: {units.format_bytes(len(payload))}, {label}{_describe_unfinished(store, row)}"


def encode_for_devices(store: Store, run: str) -> tuple[bytes, str]:
    """Return the result of a run as bytes for devices, and a description.

    The bytes are an ONNX file, or `fedquilt.formats.personal_models` data if each device has a private part of the
    network. Raise JobError before the run is done, or if devices cannot complete the network.
    """
    row = store.find_job(run)
    state, method = load_state(store, row).value, methods.load(row.job.method)
    if (status := store.current_status(row)) != "done":
        raise JobError(f"{row.id} is {status} and has no result yet: continue the run with `fedquilt resume {row.id}`")
    artefact = method.result(state)
    has_private_part = method.personal_model is not None and artefact.meta.get("private") != []
    if (private_names := artefact.meta.get("private")) and not has_private_part:
        raise JobError(
            f"{row.job.method} leaves {len(private_names)} tensors ({private_names[0]}, ...) on devices, but has no "
            "`Method.personal_model` that adds them to the network: roll out a run of another method, or a FILE.onnx"
        )
    if has_private_part:
        from fedquilt.models.networks import onnx_file  # needs onnx

        graph = onnx_file.export_without_weights(artefact.meta["network"], _reading_settings(row))
        task_spec = method.send(state, DeviceView("", None))
        assert task_spec is not None, f"{row.job.method} orders nothing of a new device"
        label = f"network {artefact.meta['network'].get('name')}, completed on each device with its part of {row.id}"
    else:
        graph, label = _encode_result(artefact, row, onnx=True)
        task_spec = TaskSpec({}, {})
    shares = None
    if row.job.personal.prior == "auto":
        graph, shares = _add_unfilled_class_priors(graph), _last_class_shares(store, row, method)
        label = f"{label}, to whose scores each device adds its class priors"
    zeros = {name: np.zeros(missing.shape, missing.dtype) for name, missing in weights.missing_tensors(graph).items()}
    require_loadable(b"".join(weights.fill_graph(graph, zeros)) if zeros else graph, label)
    return (_encode_shared_parts(row, method, task_spec, graph, shares) if zeros else graph), label


def _add_unfilled_class_priors(graph: bytes) -> bytes:
    import onnx  # not installed with every coordinator

    model = onnx.load_from_string(graph)
    (output,) = model.graph.output
    priors = onnx.TensorProto(name=personal_models.CLASS_PRIORS, data_type=onnx.TensorProto.FLOAT)
    priors.dims.append(output.type.tensor_type.shape.dim[1].dim_value)
    model.graph.initializer.append(priors)
    node = onnx.helper.make_node("Add", [output.name, priors.name], [f"{output.name}_with_{priors.name}"])
    model.graph.node.append(node)
    output.name = node.output[0]
    encoded: bytes = model.SerializeToString(deterministic=True)
    return encoded


def _last_class_shares(store: Store, row: StoredJob, method: Method) -> tuple[float, ...]:
    evaluations = [event.evaluation for _, _, event in store.read_events(row.id) if isinstance(event, RoundCommitted)]
    counted = [] if method.traits.equal_classes else [sums for sums in evaluations if sums is not None]
    return evaluation.class_shares(evaluation.count_classes(counted[-1])) if counted else ()


def require_loadable(payload: bytes | memoryview, label: str, input_shape: Sequence[int] | None = None) -> None:
    """Raise ModelError that names `label`, unless devices can load the ONNX file and its input and output fit."""
    try:
        checked = graph_check.check_bytes(payload)
        checked.require_batched_examples()
    except ModelError as error:
        raise ModelError(f"{label}: {error}") from None
    output = checked.outputs[0]
    if output.shape is not None and len(output.shape) != 2:
        raise ModelError(
            f"{label}: output {output.name[:80]!r} has the shape {graph_check.format_shape(output.shape)}, not "
            "(examples, classes): export a network that ends with scores of classes"
        )
    name, declared = checked.inputs[0].name[:80], checked.input_shape
    if input_shape is None and declared is None:
        raise ModelError(f"{label}: input {name!r} declares no number of axes: add --input-shape, such as 3,224,224")
    if input_shape is not None and not graph_check.fits_shape(input_shape, declared):
        raise ModelError(
            f"{label}: --input-shape {','.join(map(str, input_shape))} does not fit input {name!r} of shape "
            f"{graph_check.format_shape(declared)}"
        )


def _encode_shared_parts(
    row: StoredJob, method: Method, task_spec: TaskSpec, graph: bytes, class_shares: tuple[float, ...] | None
) -> bytes:
    bundles = {name: value for name, value in task_spec.bundles.items() if not isinstance(value, BlobRef)}
    task = make_task(
        task_spec,
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
    return personal_models.encode_personal(task, graph, bundles)


def _encode_result(artefact: Artefact, row: StoredJob, *, onnx: bool) -> tuple[bytes, str]:
    if artefact.kind == "stitched":
        from fedquilt.models.stitching import stitched_network
        from fedquilt.models.stitching.onnx import export  # needs onnx, which a coordinator may not have

        index = job_bundle.load_bundle(row.bundle, content=row.content)
        files = {name: job_bundle.verify_file(row.bundle, ref) for name, ref in index.files.items()}
        payload = export.export_stitched(
            artefact.meta,
            artefact.tensors,
            stitched_network.load_donor_pool(index.meta).blocks,
            files,
            _reading_settings(row),
        )
        label = f"{stitched_network.artefact_name(artefact.meta)}, labels {', '.join(artefact.meta['labels'])}"
    elif onnx:
        if artefact.kind != "weights":
            raise ModelError(
                f"a result of the kind {artefact.kind!r} has no ONNX: `fedquilt model export` writes it as .safetensors"
            )
        from fedquilt.models.networks import onnx_file  # needs onnx

        payload = onnx_file.export_network(artefact.meta["network"], artefact.tensors, _reading_settings(row))
        label = f"network {artefact.meta['network'].get('name')}"
    else:
        payload = tensors.encode_tensors(artefact.tensors, {"fedquilt": msgspec.json.encode(artefact.meta).decode()})
        name = artefact.meta.get("network", {}).get("name") if isinstance(artefact.meta.get("network"), dict) else None
        label = f"{len(artefact.tensors)} tensors" + (f" of network {name}" if name else f" ({artefact.kind})")
    return payload, label


def _reading_settings(row: StoredJob) -> Mapping[str, Any]:
    reading: Mapping[str, Any] = job_bundle.load_bundle(row.bundle).meta.get("reading", {})
    return reading


def _describe_unfinished(store: Store, row: StoredJob) -> str:
    if (status := store.current_status(row)) == "done":
        return ""
    rounds = _find_states(store, row)[2]
    return f"; no final result: {row.id} is {status}, after {rounds} of at most {row.job.rounds} rounds"
