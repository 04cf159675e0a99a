"""Work of a network's layers in training and inference, and its time and energy at an operating point.

Deadlines, the governor, budgets and simulated devices use this model:

    t = tasks * task_s + launches * launch_s + flops / flops_per_s + read_bytes / bytes_per_s        E = busy_w * t

The model assumes that arithmetic and memory traffic do not overlap. A launch is an operation started by an engine. The
cost of a launch does not depend on its size, and dominates small networks. Profiles contain rates for each measured
workload (`Rates`). Other workloads use the point's own rates. Unknown costs of launches, tasks and traffic count as 0
seconds.

Transfers of a task take additional time, in which the device idles. Their rates are measured per fleet (`LinkCost`):

    t = transfer_s + bytes / bytes_per_s
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from fedquilt.console import units
from fedquilt.core import OperatingPoint, Rates, Tensors, WorkEstimate, tensor_shapes
from fedquilt.core.messages import ADDITIVE_FIELDS
from fedquilt.costs.peak_memory import choice_name


def select_rates(work: WorkEstimate, point: OperatingPoint) -> Rates | OperatingPoint:
    return point.rates.get(work.workload, point)


def work_seconds(work: WorkEstimate, point: OperatingPoint) -> float | None:
    """Return the seconds of the work at a point, or None without work or without an arithmetic rate."""
    rates = select_rates(work, point)
    if work.flops > 0 and not rates.flops_per_s:
        return None
    arithmetic_s = work.flops / rates.flops_per_s if rates.flops_per_s else 0.0
    traffic_s = work.read_bytes / rates.bytes_per_s if rates.bytes_per_s else 0.0
    if work.flops <= 0 and not work.launches:
        return None
    total_s = overhead_seconds(work, point) + arithmetic_s + traffic_s
    return total_s if 0 < total_s < math.inf else None


def overhead_seconds(work: WorkEstimate, point: OperatingPoint) -> float:
    """Return the seconds for tasks and launches at a point, or 0 if their costs are unknown."""
    rates = select_rates(work, point)
    overhead_s = work.task_share * (rates.task_s or 0.0) + work.launches * (rates.launch_s or 0.0)
    return overhead_s if math.isfinite(overhead_s) else 0.0


def work_joules(duration_s: float, point: OperatingPoint) -> float | None:
    return None if point.busy_w is None else point.busy_w * duration_s


class LinkCost(NamedTuple):
    transfer_s: float = 0.0  # seconds of one task independent of size: messages, claims and queues
    bytes_per_s: float = math.inf

    def transfer_seconds(self, size: int) -> float:
        return self.transfer_s + size / self.bytes_per_s

    @classmethod
    def parse(cls, text: str) -> LinkCost:
        """Parse "2MB/s", or "2MB/s 50ms" with a delay for each task. Raise ValueError for other texts."""
        rate, _, delay = text.strip().partition(" ")
        scales = {f"{unit}/s": scale for unit, scale in (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9))}
        bytes_per_s = units.parse_amount(rate, scales, "rate")
        if bytes_per_s <= 0:
            raise ValueError(f"link {text!r} has no positive rate: write for example 2MB/s")
        return cls(units.parse_seconds(delay) if delay else 0.0, bytes_per_s)

    @staticmethod
    def fit_link(transfers: Sequence[tuple[int, float]]) -> LinkCost | None:
        """Return the link fitted to transfers (bytes, seconds), or None if fewer than three are not empty.

        If sizes differ by less than a factor of 2, or the fit is impossible, all time is attributed to the bytes.
        Predictions for more bytes are then too long rather than too short.
        """
        measurements = [(size, seconds) for size, seconds in transfers if size > 0]
        if len(measurements) < 3:
            return None
        sizes, times = zip(*measurements, strict=True)
        size, seconds = sum(sizes) / len(measurements), sum(times) / len(measurements)
        if max(sizes) >= 2 * min(sizes):  # by least squares
            spread = sum((size_bytes - size) ** 2 for size_bytes in sizes)
            slope = (
                sum((size_bytes - size) * (measured_s - seconds) for size_bytes, measured_s in measurements) / spread
            )
            if slope > 0 and seconds >= slope * size:
                return LinkCost(seconds - slope * size, 1 / slope)
        return LinkCost(0.0, size / seconds if seconds > 0 else math.inf)


EVALUATION_BATCH: Final = 64  # examples that an engine evaluates at once
STEP_LAUNCHES: Final = 12  # launches of a mini-batch outside of the layers: examples, loss and its backward pass
OPTIMIZER_LAUNCHES: Final = {"sgd": 2, "adam": 9}  # of an optimizer's step for one tensor; others as Adam
OPTIMIZER_PASSES: Final = {"sgd": 3, "adam": 8}  # times a tensor's bytes that an optimizer reads and writes in a step
ADAPTER_LAUNCHES: Final = 2  # of one matrix of an adapter: the product, and scaling or adding it


class Layer(NamedTuple):
    path: str  # path of the module
    flops: float  # per example, of products with weights
    free_flops: float  # per example, of products of activations with each other, as in attention
    bytes: float  # activations read and written per example
    launches: int  # operations per mini-batch


class PassCost(NamedTuple):
    """Cost of a pass: FLOPs and bytes per example, kernel launches per mini-batch."""

    flops: float = 0.0
    bytes: float = 0.0
    launches: float = 0.0

    def add_scaled(self, addend: PassCost, times: float = 1.0) -> PassCost:
        return PassCost(*(a + times * b for a, b in zip(self, addend, strict=True)))


def parse_layers(meta: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return the layers in a bundle's metadata, or one layer with the FLOPs of the whole network."""
    layers = tuple(Layer(str(path), *numbers) for path, *numbers in meta.get("layers", ()))
    return layers or (Layer("", float(meta.get("flops", 0)), 0.0, 0.0, 0),)


def layers_by_tensor(layers: Sequence[Layer], names: Iterable[str]) -> dict[str, str]:
    """Return the path of each tensor's layer: the nearest enclosing layer, or the first layer if none."""
    paths, first_path = {layer.path for layer in layers}, layers[0].path if layers else ""
    tensors = {}
    for name in names:
        path = name
        while path and path not in paths:
            path = path.rpartition(".")[0]
        tensors[name] = path if path in paths else first_path
    return tensors


def forward_cost(layers: Iterable[Layer]) -> PassCost:
    total = PassCost()
    for layer in layers:
        total = total.add_scaled(PassCost(layer.flops + layer.free_flops, layer.bytes, layer.launches))
    return total


def training_cost(layers: Sequence[Layer], trained_names: Iterable[str]) -> PassCost:
    """Return the cost of a training pass: forward, and backward down to the first trained layer.

    A trained layer costs a second forward pass, for the gradients of its weights. A layer after a trained one costs
    another, for the gradients of its inputs.
    """
    trained = set(layers_by_tensor(layers, trained_names).values())
    total = forward_cost(layers)
    is_after_trained = len(layers) == 1 and not layers[0].launches  # one layer for the whole network
    for layer in layers:
        is_trained = layer.path in trained
        times = is_trained + is_after_trained if layer.flops else float(is_trained or is_after_trained)
        flops = times * layer.flops + 2 * layer.free_flops * (is_trained or is_after_trained)
        total = total.add_scaled(PassCost(flops, times * layer.bytes, times * layer.launches))
        is_after_trained = is_after_trained or is_trained
    return total


def split_at_trained(
    layers: Sequence[Layer], trained_names: Iterable[str]
) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """Return the layers before the first trained layer, and the layers from that one on."""
    trained = set(layers_by_tensor(layers, trained_names).values())
    first_index = next((index for index, layer in enumerate(layers) if layer.path in trained), len(layers))
    return tuple(layers[:first_index]), tuple(layers[first_index:])


def scale_layers(layers: Sequence[Layer], full_model: Tensors, part: Tensors) -> tuple[Layer, ...]:
    """Return the layers of a smaller part of a model, with costs scaled by the part's share of weights.

    A layer without weights is scaled like the previous layer. Layers that the part lacks are left out.
    """
    names: dict[str, list[str]] = {}
    for name, path in layers_by_tensor(layers, full_model).items():
        names.setdefault(path, []).append(name)
    scaled, rows = [], 1.0
    for layer in layers:
        layer_weights = [name for name in names.get(layer.path, ()) if full_model[name].ndim]
        if layer_weights:
            widest = max(layer_weights, key=lambda name: full_model[name].size)
            rows = len(part[widest]) / len(full_model[widest]) if widest in part else 0.0
            share = part[widest].size / full_model[widest].size if widest in part else 0.0
        else:
            share = rows
        if share:
            launches = layer.launches
            scaled.append(Layer(layer.path, layer.flops * share, layer.free_flops * rows, layer.bytes * rows, launches))
    return tuple(scaled)


def add_adapter_layers(layers: Sequence[Layer], backbone: Tensors, added: Tensors) -> tuple[Layer, ...]:
    """Return the layers with low-rank adapters: each added matrix is a layer after its adapted layer.

    The matrix is applied as often as the weights of that layer. Added tensors other than matrices cost nothing.
    """
    matrices = {name: array for name, array in added.items() if array.ndim == 2 and name not in backbone}
    layer_tensors = layers_by_tensor(layers, backbone) if layers else {}
    extended: list[Layer] = []
    for layer in layers:
        extended.append(layer)
        weights = [name for name, path in layer_tensors.items() if path == layer.path and backbone[name].ndim > 1]
        adapted_size = sum(backbone[name].size for name in weights)
        for name, path in layers_by_tensor(layers, matrices).items():
            if path == layer.path and adapted_size:
                flops = layer.flops * matrices[name].size / adapted_size
                extended.append(Layer(name, flops, 0.0, layer.bytes / 2, ADAPTER_LAUNCHES))
    return tuple(extended)


def workload_kind(layers: Sequence[Layer], convolutions: Iterable[str]) -> str:
    """Return "conv" if over half of the arithmetic is in `convolutions` (module paths), or else "dense"."""
    convolution_paths = set(layers_by_tensor(layers, convolutions).values())
    total_flops = sum(layer.flops + layer.free_flops for layer in layers)
    convolution_flops = sum(layer.flops for layer in layers if layer.path in convolution_paths)
    return "conv" if total_flops and convolution_flops > total_flops / 2 else "dense"


def part_shares(layers: Sequence[Layer], full_model: Tensors, part: Tensors) -> tuple[float, float]:
    """Return a part's shares (0 to 1) of the full model's forward arithmetic and of its activation bytes."""
    part_cost, full_cost = forward_cost(scale_layers(layers, full_model, part)), forward_cost(layers)
    return (
        part_cost.flops / full_cost.flops if full_cost.flops else 1.0,
        part_cost.bytes / full_cost.bytes if full_cost.bytes else 1.0,
    )


def training_work(
    pass_cost: PassCost, params: Mapping[str, Any], trained_bytes: Mapping[str, int], weights_bytes: int
) -> WorkEstimate:
    """Return the work of training, per example and per mini-batch. `pass_cost` includes the backward pass."""
    epochs, optimizer = int(params.get("epochs", 1)), choice_name(params.get("optimizer", "sgd"))
    optimizer = optimizer if optimizer in OPTIMIZER_LAUNCHES else "adam"
    extra_operations = sum(bool(params.get(key)) for key in ("momentum", "weight_decay", "ema"))
    extra_operations += 2 * bool(params.get("clip"))
    tensor_launches = OPTIMIZER_LAUNCHES[optimizer] + extra_operations
    launches = pass_cost.launches + STEP_LAUNCHES + tensor_launches * len(trained_bytes)
    traffic = 2 * weights_bytes + (OPTIMIZER_PASSES[optimizer] + extra_operations + 1) * sum(trained_bytes.values())
    return WorkEstimate(
        flops_per_example=epochs * pass_cost.flops,
        bytes_per_example=epochs * pass_cost.bytes,
        launches_per_batch=epochs * launches,
        bytes_per_batch=epochs * traffic,
        batch=int(params.get("batch", 0)),
    )


def inference_work(
    pass_cost: PassCost, weights_bytes: int, share: float = 1.0, batch: int = EVALUATION_BATCH
) -> WorkEstimate:
    """Return the work of forward passes over a share of a device's examples, EVALUATION_BATCH at once.

    Counts per mini-batch in the estimate are for mini-batches of `batch` examples.
    """
    return WorkEstimate(
        flops_per_example=share * pass_cost.flops,
        bytes_per_example=share * pass_cost.bytes,
        launches_per_batch=share * (pass_cost.launches + STEP_LAUNCHES) * batch / EVALUATION_BATCH,
        bytes_per_batch=share * weights_bytes * batch / EVALUATION_BATCH,
        batch=batch,
    )


def repeat_work(work: WorkEstimate, times: float) -> WorkEstimate:
    return msgspec.structs.replace(work, **{name: times * getattr(work, name) for name in ADDITIVE_FIELDS})


def trained_tensor_bytes(model: Tensors, trained_names: Collection[str]) -> dict[str, int]:
    shapes = tensor_shapes(model)
    return {name: shapes[name].nbytes for name in trained_names if name in shapes and shapes[name].dtype.kind == "f"}
