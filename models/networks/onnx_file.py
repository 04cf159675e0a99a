"""Export of a trained network as one ONNX file.

Networks other than `mlp` need torch.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx

from fedquilt.core import ModelError, Tensors
from fedquilt.core.errors import first_line
from fedquilt.models.networks import mlp_graph, numpy_init, onnx_scaling, registry

if TYPE_CHECKING:
    from torch import nn

OPSET = 17  # onnxruntime 1.19 and later: what JetPack 5 can install


def trace_to_onnx(
    module: nn.Module, shape: Sequence[int], name: str, fix: str, *, keep_tensor_names: bool = False
) -> onnx.ModelProto:
    """Trace a module as an ONNX graph from "x", (n, *shape) float32, to "y".

    Args:
        module: Module in evaluation mode.
        shape: Shape of one example.
        name: Name of the module in error messages.
        fix: Hint in the error message if ONNX lacks an operation.
        keep_tensor_names: Whether the graph keeps the module's tensors under their names, without constant folding.
    """
    import torch

    file = io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad(), registry.without_fused_attention():
            export_options = (
                {"do_constant_folding": False, "training": torch.onnx.TrainingMode.PRESERVE}
                if keep_tensor_names
                else {}
            )
            # torch's newer exporter requires another package and writes an opset that boards cannot read.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                (torch.zeros(2, *shape),),
                file,
                dynamo=False,
                opset_version=OPSET,
                input_names=["x"],
                output_names=["y"],
                dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
                **export_options,
            )
    except Exception as error:  # torch.onnx's errors have no common base
        reason = first_line(error)
        raise ModelError(f"{name} cannot be written as ONNX: {reason}; {fix}") from error
    return onnx.load_from_string(file.getvalue())


def export_network(network: Mapping[str, Any], weights: Tensors, reading: Mapping[str, Any] | None = None) -> bytes:
    """Return the network with its weights as ONNX: "x" (n, ...) float32 to "y" (n, outputs).

    The graph standardises its inputs, and rescales the outputs of a regression to their units. The file's metadata has
    the network's table under "network" and its reading settings under "reading", both without the scales that the graph
    applies, and the mean and std of the inputs under "scale".
    """
    proto = _make_graph(network, weights)
    return _serialise_with_scales(proto, network, reading or {})


def export_without_weights(network: Mapping[str, Any], reading: Mapping[str, Any] | None = None) -> bytes:
    """Return the network as ONNX without the values of its tensors, which `fedquilt.onnx.weights` adds."""
    return _serialise_with_scales(_make_empty_graph(network), network, reading or {})


def _make_graph(network: Mapping[str, Any], weights: Tensors) -> onnx.ModelProto:
    if network.get("name") == "mlp":
        _require_whole_network(network, numpy_init.tensor_names(network), weights)
        return mlp_graph.make_mlp_graph(network, weights, OPSET)
    import torch

    model = registry.build_network(network)
    _require_whole_network(network, model.state_dict(), weights)
    model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    name, fix = f"network {network.get('name')!r}", "export it as .safetensors"
    return trace_to_onnx(model.eval(), registry.input_shape(network), name, fix)


def _require_whole_network(network: Mapping[str, Any], names: Iterable[str], weights: Tensors) -> None:
    if odd := sorted(set(names) ^ weights.keys()):
        raise ModelError(
            f"the result is not the whole network {network.get('name')!r} ({odd[0]!r} differs): "
            "export it as .safetensors, which accepts any tensors"
        )


def _make_empty_graph(network: Mapping[str, Any]) -> onnx.ModelProto:
    if network.get("name") == "mlp":
        return mlp_graph.make_mlp_graph(network, None, OPSET)
    import torch

    from fedquilt.models.networks import traces

    model = registry.load_network(network, seed=0)
    float_tensors = {
        name: value.detach() for name, value in traces.state_without_aliases(model).items() if value.is_floating_point()
    }
    draws = torch.Generator().manual_seed(0)
    for value in float_tensors.values():  # different values, because the exporter merges equal tensors
        value.copy_(torch.rand(value.shape, generator=draws) + 0.5)
    name, fix = f"network {network.get('name')!r}", "roll out the result of a method that trains the whole network"
    proto = trace_to_onnx(model, registry.input_shape(network), name, fix, keep_tensor_names=True)
    graphs = {tensor.name: tensor for tensor in proto.graph.initializer}
    if odd := sorted(float_tensors.keys() - graphs.keys()):
        raise ModelError(f"the ONNX of {name} has no tensor {odd[0]!r}, so devices cannot insert weights: {fix}")
    for tensor_name in float_tensors:
        graphs[tensor_name].ClearField("raw_data")
    return proto


def _serialise_with_scales(proto: onnx.ModelProto, network: Mapping[str, Any], reading: Mapping[str, Any]) -> bytes:
    table, settings = dict(network), dict(reading)
    tables: dict[str, Any] = {"network": table, "reading": settings}
    if (input_table := network.get("input")) is not None:
        table["input"] = onnx_scaling.outside_input(input_table)
        if scale := onnx_scaling.input_scale(input_table, registry.input_shape(network)):
            onnx_scaling.standardise_inputs(proto, scale)
            tables["scale"] = scale.to_table()
    if target := settings.pop("target", None):
        onnx_scaling.rescale_outputs(proto, target["mean"], target["std"])
    proto.producer_name, proto.producer_version = "fedquilt", ""
    onnx.helper.set_model_props(proto, {name: json.dumps(table, sort_keys=True) for name, table in tables.items()})
    return bytes(proto.SerializeToString(deterministic=True))
