"""Initial weights and costs of an `mlp` in numpy. Weights are bit-identical to torch's.

torch draws with the Mersenne twister, which numpy has too: a number is 24 bits of a draw, scaled to the bounds of
`torch.nn.Linear`. So a job of an `mlp` is prepared without torch, with the same bundle as with torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedquilt.core import ModelError
from fedquilt.costs import peak_memory
from fedquilt.costs.cost_model import Layer
from fedquilt.formats import tensor_register
from fedquilt.models.networks import registry

_BITS = 24  # of a float's mantissa


def can_initialise(network: Mapping[str, Any], weights: object) -> bool:
    return network.get("name") == "mlp" and weights is None


def initial_mlp_weights(network: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return an mlp's float32 tensors "1.weight" (out, in), "1.bias" (out,) and so on, drawn as by torch."""
    source = np.random.MT19937()
    seeded: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)  # seeded like `torch.manual_seed`
    source.state = seeded
    weights: dict[str, np.ndarray] = {}
    for path, (outputs, inputs) in layer_sizes(network).items():
        gain = math.sqrt(2.0 / (1 + math.sqrt(5) ** 2))  # kaiming_uniform_ with a = sqrt(5)
        bound = math.sqrt(3.0) * (gain / math.sqrt(inputs))
        weights[f"{path}.weight"] = _draw_uniform_like_torch(source, bound, inputs * outputs).reshape(outputs, inputs)
        weights[f"{path}.bias"] = _draw_uniform_like_torch(source, 1 / math.sqrt(inputs), outputs)
    return weights


def tensor_names(network: Mapping[str, Any]) -> list[str]:
    return [f"{path}.{part}" for path in layer_sizes(network) for part in ("weight", "bias")]


def forward_flops(network: Mapping[str, Any]) -> float:
    return float(sum(2 * outputs * inputs for outputs, inputs in layer_sizes(network).values()))


def mlp_register(network: Mapping[str, Any]) -> tensor_register.TensorRegister:
    return tensor_register.make_mlp_register(len(_validated_layer_widths(network)) - 1)


def mlp_costs_by_layer(network: Mapping[str, Any]) -> list[Layer]:
    costs: list[Layer] = []
    for path, (outputs, inputs) in layer_sizes(network).items():
        if costs:
            costs.append(Layer(str(int(path) - 1), 0.0, 0.0, 8.0 * inputs, 1))
        costs.append(Layer(path, 2.0 * outputs * inputs, 0.0, 4.0 * (inputs + outputs), 1))
    return costs


def layer_sizes(network: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    pairs = itertools.pairwise(_validated_layer_widths(network))
    return {f"{2 * index + 1}": (outputs, inputs) for index, (inputs, outputs) in enumerate(pairs)}


def mlp_training_memory(network: Mapping[str, Any]) -> peak_memory.TrainingProperties:
    widths = _validated_layer_widths(network)
    sizes = [inputs * outputs for inputs, outputs in itertools.pairwise(widths)]
    return peak_memory.TrainingProperties(
        weights_bytes=4 * (sum(sizes) + sum(widths[1:])),
        convolutions=0,
        kept_bytes=4 * sum(widths[:-1]),
        largest_kept_bytes=4 * max(widths[:-1]),
        largest_output_bytes=4 * max(widths),
    )


def _draw_uniform_like_torch(source: np.random.MT19937, bound: float, count: int) -> np.ndarray:
    # The same numbers as torch.Tensor.uniform_ on a CPU.
    low, high = np.float32(-bound), np.float32(bound)
    share = (source.random_raw(count) & ((1 << _BITS) - 1)) * 2.0**-_BITS  # float64: torch rounds once, at the end
    return (share * float(high - low) + float(low)).astype(np.float32)


def _validated_layer_widths(network: Mapping[str, Any]) -> Sequence[int]:
    settings = {key: value for key, value in network.items() if key not in ("name", "input", "register", "task")}
    hidden = settings.pop("hidden", (64,))
    hidden_widths = hidden if isinstance(hidden, list | tuple) else (hidden, None)
    widths = [settings.pop("inputs", None), *hidden_widths, settings.pop("classes", None)]
    if settings or not all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in widths):
        raise ModelError(
            f"network 'mlp' cannot be built from {registry.describe_settings(network)}: set inputs, classes and "
            "hidden (a list) to whole numbers above 0"
        )
    values = math.prod(registry.input_shape(network))
    if values != widths[0]:
        raise ModelError(f"network 'mlp' has {widths[0]} inputs, but the input has {values}: set inputs = {values}")
    return widths
