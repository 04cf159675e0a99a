"""Audit of the examples that a coordinator could reconstruct from uploads (`fedquilt lab audit`).

A simulated device trains one example in one step with the method's own code, the worst case for privacy. The attacker
has the upload, the network, the device's weights before the step, the learning rate and the label. The network is LeNet
with sigmoids and weights from U(-0.5, 0.5), as in the attack's papers, because the second derivative of ReLU is 0.

Attack: iDLG (Zhao et al., arXiv 2001.02610) as in GENE-FL (arXiv 2504.14628, Eq. 13): find x' whose gradient of the
uploaded layers is the uploaded one. PSNR is over pixels of 0 to 1. A single layer can be enough: from four 5x5 filters
the attack recovered images of 8x8 pixels (83 dB), but not of 12x12 (6 dB). GENE-FL's fingerprint (Eq. 11 of its paper)
is a subspace of the examples, not a gradient: its first vector is compared with the mean image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.console import progress
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import ClientContext, ClientResult, DataError, Examples, JobError, Task, Tensors
from fedquilt.data import examples as shares
from fedquilt.data import inputs
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.engines.torch.engine import TorchEngine
from fedquilt.formats import job_bundle
from fedquilt.host import disk
from fedquilt.models import subspaces
from fedquilt.models.networks import registry, traces
from fedquilt.tools.report import plots
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.pool import ScratchFolder
from fedquilt.tools.simulation.run import iterate_states
from fedquilt.tools.simulation.simulated_job import UNLIMITED_BYTES, UNLIMITED_FLEET

MAX_STEPS: Final = 300  # of an attack
NOISE: Final = 0.001  # standard deviation of the noise that one row adds to gradients
SEED: Final = 0  # of the choice of images and of the attack
LEARNING_RATE: Final = 1.0  # of the one step, which then is the gradient itself
ONE_STEP_PARAMS: Final = {"epochs": 1, "batch": 1, "lr": LEARNING_RATE}
FINGERPRINT_SIZES: Final = (16, 64, 256)  # numbers of examples
STARTS = 2  # of an attack; the best counts, because the attacker knows the loss
CELL, GAP, TOP = 112, 12, 40  # pixels


@dataclass(frozen=True)
class UploadVariant:
    label: str
    method: str
    params: Mapping[str, Any]
    noise: float = 0.0  # deviation of the normal noise on every value of the gradient


VARIANTS: Final = (
    UploadVariant("FedAvg", "fedavg", {}),
    UploadVariant(f"FedAvg, noise {NOISE:g}", "fedavg", {}, NOISE),
    UploadVariant("ParFed, 1 layer kept", "parfed", {"layers": 1}),
    UploadVariant("ParFed, 3 layers kept", "parfed", {"layers": 3}),
    UploadVariant("GENE-FL, all layers", "genefl", {}),
    UploadVariant("GENE-FL, 1 layer", "genefl", {"first_layers": 1}),
)


def extract_gradient(
    variant: UploadVariant, network: Mapping[str, Any], start: Tensors, example: Examples, engine: Any
) -> Tensors:
    """Return the gradient that a device's uploads after one step reveal, by tensor of the network.

    Tensors that are not uploaded are missing. Raise JobError if the method uploads none.
    """
    uploads: list[Mapping[str, Tensors]] = []
    method = methods.load(variant.method)

    def record_work(task: Task, site: ClientContext) -> ClientResult:
        result = method.work(task, site)
        uploads.append(result.bundles)
        return result

    accepted_params = {field.name for field in fields(method.params)}
    params = {key: value for key, value in {**ONE_STEP_PARAMS, **variant.params}.items() if key in accepted_params}
    job = JobSettings(name="audit", method=variant.method, rounds=3, params=params, fleet=UNLIMITED_FLEET)
    victim = DeviceData("victim", example, Examples(example.x[:0], example.y[:0]))
    recording_method = replace(method, work=record_work)

    with ScratchFolder() as bundle_folder:
        register = traces.register_from_table(network)
        job_bundle.write_bundle(
            bundle_folder, {"network": dict(network), "register": register}, {"model": tensors.encode_tensors(start)}
        )
        for _ in iterate_states(job, bundle_folder, [victim], load_method=lambda name: recording_method, engine=engine):
            arrays = [
                (name, array) for bundles in uploads for bundle in bundles.values() for name, array in bundle.items()
            ]
            differences = {
                name: (start[name].astype(np.float64) - array) / LEARNING_RATE
                for name, array in arrays
                if name in start and array.shape == start[name].shape
            }
            if differences:
                return differences
    raise JobError(f"{variant.method} uploads no tensors of the network: audit another method")


def audit_methods(data: Path, *, count: int = 4, size: int = 0) -> dict[str, Any]:
    """Attack `count` examples of each variant, scaled to `size` pixels unless 0, and return results.

    "rows" has PSNR in dB, uploaded values and inferred labels by variant, "pictures" for each example the original and
    its reconstructions (h, w, channels) from 0 to 1. Raise DataError if the examples are not square images.
    """
    examples = shares.load_split(DataSpec(path=str(data), limit=max(count, *FINGERPRINT_SIZES), size=size, seed=SEED))
    if examples.x.ndim not in (3, 4) or examples.x.shape[1] != examples.x.shape[2]:
        raise DataError(f"{data}: examples {examples.x.shape[1:]} are not square images: scale them with --size")
    channels, side = (1 if examples.x.ndim == 3 else examples.x.shape[3]), examples.x.shape[1]
    table = {"channels": channels, "size": side}
    network = {"name": "lenet", **table, "classes": max(10, int(examples.y.max()) + 1), "input": table}
    start, head = draw_weights(network, SEED), traces.register_from_table(network).find_classifier()
    engine = TorchEngine(UNLIMITED_BYTES)
    torch.set_num_threads(1)  # several threads are slower on such a small network
    results: dict[str, Any] = {variant.label: {"psnr_db": [], "values": 0, "label_read": []} for variant in VARIANTS}
    pictures: list[list[np.ndarray]] = []
    for index in range(min(count, len(examples))):
        example = Examples(examples.x[index : index + 1], examples.y[index : index + 1])
        original = inputs.prepare_images(example.x, table)[0]
        images = [original]
        for number, variant in enumerate(VARIANTS):
            progress.LINE.set_part(
                variant.label, index * len(VARIANTS) + number, min(count, len(examples)) * len(VARIANTS)
            )
            gradient = extract_gradient(variant, network, start, example, engine)
            rng = tensors.seeded_rng("audit", SEED, index, variant.label)
            if variant.noise:
                gradient = {name: array + rng.normal(0, variant.noise, array.shape) for name, array in gradient.items()}
            label = int(example.y[0])
            guess = reconstruct_example(network, start, gradient, label, original.shape, rng, MAX_STEPS)
            entry = results[variant.label]
            entry["psnr_db"].append(round(psnr(guess, original), 2))
            entry["values"] = sum(array.size for array in gradient.values())
            entry["label_read"].append(infer_label(gradient, head) == label)
            images.append(guess)
        pictures.append([np.moveaxis(each, 0, -1) for each in images])
    return {
        "rows": {
            label: {**each, "mean_db": round(float(np.mean(each["psnr_db"])), 2)} for label, each in results.items()
        },
        "fingerprints": compare_fingerprints(examples),
        "settings": {"network": network, "steps": MAX_STEPS, "noise": NOISE, "seed": SEED, "examples": len(pictures)},
        "pictures": pictures,
    }


def compare_fingerprints(examples: Examples) -> list[dict[str, float]]:
    """Return the cosine of fingerprints' first vectors and the mean image, for several example counts."""
    similarities = []
    for size in (1, *FINGERPRINT_SIZES):
        if size <= len(examples):
            subset = examples.x[:size]
            likeness = subspaces.mean_similarity(subset, subspaces.compute_subspace(subset, 5))
            similarities.append({"examples": size, "cosine": round(likeness, 4)})
    return similarities


def psnr(guess: np.ndarray, truth: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio in decibels, at most 100, for pixels from 0 to 1."""
    error = float(np.square(guess.astype(np.float64) - truth).mean())
    return min(100.0, float(-10 * np.log10(error))) if error > 0 else 100.0


def format_result(result: Mapping[str, Any]) -> list[str]:
    settings = result["settings"]
    lines = [
        f"iDLG on {settings['examples']} examples, up to {settings['steps']} steps; a high PSNR means a recovered image"
    ]
    for label, row in result["rows"].items():
        decibels = ", ".join(f"{value:.1f}" for value in row["psnr_db"])
        read = f"label inferred for {sum(row['label_read'])} of {len(row['label_read'])}"
        lines.append(f"  {label:24} {row['mean_db']:6.2f} dB ({decibels})   {row['values']} values, {read}")
    lines.append("GENE-FL's fingerprint: cosine of its first vector and the mean image, by number of examples")
    cosines = [f"{decibels['cosine']:.3f} of {decibels['examples']}" for decibels in result["fingerprints"]]
    return [*lines, f"  {', '.join(cosines)}"]


def audit_and_print(data: Path, out: Path, format: str, options: Mapping[str, Any]) -> None:
    result = audit_methods(data, **options)
    by_picture = zip(*(row["psnr_db"] for row in result["rows"].values()), strict=True)
    notes = [["", *(f"{decibels:.1f} dB" for decibels in row)] for row in by_picture]
    disk.write_output(out, render_grid(["original", *result["rows"]], result.pop("pictures"), notes))
    text = "\n".join([*format_result(result), f"wrote the images: {out}"])
    progress.LINE.print_to_stdout(
        msgspec.json.format(msgspec.json.encode(result)).decode() if format == "json" else text
    )


def draw_weights(network: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Draw the network's tensors from U(-0.5, 0.5)."""
    rng = tensors.seeded_rng("audit weights", seed)
    state = registry.build_network(network).state_dict()
    return {
        name: rng.uniform(-0.5, 0.5, tuple(value.shape)).astype(np.float32) for name, value in sorted(state.items())
    }


def infer_label(gradient: Tensors, head: str | None) -> int | None:
    """Return a single example's label, inferred from the head's bias gradient, or None if that is missing."""
    bias = gradient.get(f"{head}.bias")
    return None if bias is None else int(bias.argmin())


def reconstruct_example(
    network: Mapping[str, Any],
    start: Tensors,
    gradient: Tensors,
    label: int,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    steps: int,
) -> np.ndarray:
    """Return an image from 0 to 1 with the gradient nearest to `gradient` (GENE-FL, Eq. 13).

    This is iDLG's Algorithm 1 in float64 with a line search (strong Wolfe). The paper has none and fails more often.
    """
    model = registry.build_network(network).double()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(torch.tensor(start[name]))
    parameters = dict(model.named_parameters())
    uploaded = [parameters[name] for name in gradient]
    targets = [torch.tensor(np.asarray(array, np.float64)) for array in gradient.values()]
    squared_norm = sum(float(target.square().sum()) for target in targets) or 1.0
    y = torch.tensor([label])
    best_image, least_distance = np.zeros(shape), np.inf
    for _ in range(STARTS):
        x = torch.tensor(rng.normal(0.0, 1.0, (1, *shape)), requires_grad=True)
        search = torch.optim.LBFGS(
            [x],
            max_iter=steps,
            history_size=50,
            line_search_fn="strong_wolfe",
            tolerance_grad=1e-14,
            tolerance_change=1e-14,
        )

        def closure(x: torch.Tensor = x, search: torch.optim.LBFGS = search) -> torch.Tensor:
            search.zero_grad()
            gradients = torch.autograd.grad(F.cross_entropy(model(x), y), uploaded, create_graph=True)
            distance = (
                sum(((a - b).square().sum() for a, b in zip(gradients, targets, strict=True)), torch.zeros(()))
                / squared_norm
            )
            distance.backward(inputs=[x])
            return distance

        search.step(closure)
        distance = float(closure().detach())
        if distance < least_distance:
            best_image, least_distance = x.detach().numpy()[0].copy(), distance
    return np.clip(best_image, 0, 1).astype(np.float32)


def render_grid(titles: Sequence[str], rows: Sequence[Sequence[np.ndarray]], notes: Sequence[Sequence[str]]) -> str:
    """Return a standalone SVG with a grid of images: a column for each title, and a note below each image."""
    stride = CELL + GAP

    def draw(axis: plots.Axis, add_tooltip: plots.AddTooltip) -> None:
        for column, title in enumerate(titles):
            middle = GAP + stride * column + CELL / 2
            axis.text(middle, TOP - 4, title.replace(", ", "\n", 1), ha="center", va="bottom")
            for number, (row, note) in enumerate(zip(rows, notes, strict=True)):
                image, (x, y) = row[column], (GAP + stride * column, TOP + (stride + 14) * number)
                values = (
                    np.clip(image, 0, 1).reshape(image.shape[:2]) if image.shape[2:] != (3,) else np.clip(image, 0, 1)
                )
                extent = (x, x + CELL, y + CELL, y)
                artist = axis.imshow(values, "gray", vmin=0, vmax=1, extent=extent, interpolation="none", aspect="auto")
                add_tooltip(artist, f"{title} {note[column]}".strip())
                axis.text(middle, y + CELL + 12, note[column], ha="center")

    size = GAP + stride * len(titles), TOP + (stride + 14) * len(rows)
    description = f"{len(rows)} images and their reconstructions: {', '.join(titles)}"
    return plots.add_background(plots.render_picture(plots.Picture(*size, description, draw)))
