"""Traces of networks: operations by torch.fx, costs of layers, and names of tensors. Requires torch."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedquilt.core import ModelError
from fedquilt.core.errors import first_line
from fedquilt.costs.cost_model import Layer
from fedquilt.formats.tensor_register import ATTENTION, PARAMETRIZATION_PATH, Kind, RegisterEntry, TensorRegister
from fedquilt.models.networks import registry
from fedquilt.models.networks.architectures import Attention

_TORCH = Path(torch.__file__).parent


class _PathTracer(fx.Tracer):  # type: ignore[misc]
    failed = ""

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.path_of_module(m)
            raise


def trace_network(model: nn.Module, subject: str, fix: str) -> fx.GraphModule:
    """Trace a network with torch.fx.

    Args:
        model: Network to trace.
        subject: Name of the network in the error message.
        fix: Advice that ends the error message, as an alternative to "remove branches on values".

    Raises:
        ModelError: If the network has operations that torch.fx cannot trace.
    """
    tracer = _PathTracer()
    try:
        graph = tracer.trace(model)
    except Exception as error:  # the network's own code may raise any exception on a symbolic value
        module = model.get_submodule(tracer.failed)
        location = f"module {tracer.failed!r}" if tracer.failed else "the network's own forward()"
        reason = first_line(error)
        raise ModelError(
            f"{subject} cannot be traced: torch.fx fails in {location} ({type(module).__name__}"
            f"{_error_location(error)}): {reason}; remove branches on values there, or {fix}"
        ) from None
    return fx.GraphModule(model, graph)


def _error_location(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _TORCH not in Path(f.filename).parents]
    innermost = frames[-1]
    return (
        ""
        if Path(innermost.filename) == Path(__file__)
        else f", {Path(innermost.filename).name}, line {innermost.lineno}"
    )


def trace_layer_costs(model: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """Return the cost of each layer for one example of `shape`, in the order of first use.

    The network runs in evaluation mode with gradients. Without gradients torch uses fused kernels for transformers,
    which training does not use.
    """
    counter = _OperationCounter(model)
    was_training = model.training
    device = next((value.device for value in model.parameters()), torch.device("cpu"))
    try:
        x = torch.zeros(1, *shape, device=device)
        with torch.enable_grad(), counter:
            model.eval()(x)
    finally:
        model.train(was_training)
        counter.remove_hooks()
    return [Layer(path, *numbers) for path, numbers in counter.counts_by_layer.items()]


class _OperationCounter(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weight_addresses = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._running = [""]
        self.counts_by_layer: dict[str, list[Any]] = {}
        self._watches = []
        for path, module in model.named_modules():
            self._watches.append(
                module.register_forward_pre_hook(lambda _, inputs, path=path: self._running.append(path))
            )
            self._watches.append(module.register_forward_hook(lambda _, inputs, output: self._leave_module()))

    def remove_hooks(self) -> None:
        for watch in self._watches:
            watch.remove()

    def _leave_module(self) -> None:
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.is_view:
            return output
        row = self.counts_by_layer.setdefault(self._running[-1], [0.0, 0.0, 0.0, 0])
        activations = [
            value
            for value in _tensors_in((args, kwargs))
            if value.untyped_storage().data_ptr() not in self._weight_addresses
        ]
        weighted = len(activations) < len(_tensors_in((args, kwargs)))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            row[0 if weighted else 1] += float(count(*args, **(kwargs or {}), out_val=output))
        row[2] += float(sum(value.nbytes for value in (*activations, *_tensors_in(output))))
        row[3] += 1
        return output


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def register_from_table(network: Mapping[str, Any]) -> TensorRegister:
    return trace_register(registry.build_network(network), registry.input_shape(network))


def trace_register(model: nn.Module, shape: tuple[int, ...]) -> TensorRegister:
    """Return the register of a network: its tensors, and its modules in the order of their first call.

    The calls are those of an example of this shape (without batch) in evaluation mode. Trained tensors are those that a
    training step with two examples, on a copy of the network, changes or gives a gradient.
    """
    modules, names_by_id, state = dict(model.named_modules()), _tensor_names_by_id(model), state_without_aliases(model)
    trained_names, calls = _names_trained_by_step(model, shape), _trace_calls(model, shape)
    layers, rows = _find_layer_before_each_norm(modules, calls), []
    for name, value in state.items():
        path = name.partition(PARAMETRIZATION_PATH)[0] if PARAMETRIZATION_PATH in name else name.rpartition(".")[0]
        module = modules[path]
        parameter = isinstance(value, nn.Parameter)
        kind: Kind = "parameter" if parameter else "buffer" if value.is_floating_point() else "counter"
        state_buffers = [buffer for buffer in module.buffers(recurse=False) if id(buffer) in names_by_id]
        running = [names_by_id[id(b)][0] in trained_names for b in state_buffers if b.is_floating_point()]
        normalises = isinstance(module, _NORMS) or (any(running) and not any(module.children()))
        layer, type_name = layers.get(path, path), _nearest_torch_type_name(module)
        aliases = tuple(names_by_id[id(value)][1:])
        rows.append(RegisterEntry(name, kind, path, layer, type_name, normalises, name in trained_names, aliases))
    return TensorRegister(tuple(rows), tuple(calls))


def state_without_aliases(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the network's own tensors, each under its first name in the state dict."""
    state = model.state_dict(keep_vars=True)
    first_names = {names[0] for names in names_of_tensors(model)}
    return {name: value for name, value in state.items() if name in first_names}


def names_of_tensors(model: nn.Module) -> list[list[str]]:
    return list(_tensor_names_by_id(model).values())


def state_names_by_alias(model: nn.Module) -> dict[str, str]:
    """Return the name in `state_without_aliases` of each tensor, by module path and attribute."""
    first_names: dict[str, str] = {}
    names_by_id = _tensor_names_by_id(model)
    for path, module in model.named_modules():
        own_tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        first_names |= {
            f"{path}.{attribute}" if path else attribute: names_by_id[id(v)][0]
            for attribute, v in own_tensors.items()
            if id(v) in names_by_id
        }
    return first_names


def modules_sharing_weight(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return path and module of each module that shares the weight of the one at `path`, itself included."""
    weight = model.get_submodule(path).weight
    all_modules = model.named_modules(remove_duplicate=False)
    return [(module_path, module) for module_path, module in all_modules if getattr(module, "weight", None) is weight]


def _tensor_names_by_id(model: nn.Module) -> dict[int, list[str]]:
    names_by_id: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names_by_id.setdefault(id(value), []).append(name)
    return names_by_id


def _nearest_torch_type_name(module: nn.Module) -> str:
    if isinstance(module, Attention):
        return ATTENTION
    for kind in type(module).__mro__:
        if kind is not nn.Module and getattr(nn, kind.__name__, None) is kind:
            return kind.__name__
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _find_layer_before_each_norm(modules: Mapping[str, nn.Module], calls: Sequence[str]) -> dict[str, str]:
    layers, previous_path = {}, ""
    for path in calls:
        module = modules[path]
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            previous = modules[previous_path]
            if module.num_features == getattr(previous, "out_channels", getattr(previous, "out_features", None)):
                layers[path] = previous_path
        if not any(module.children()):
            previous_path = path
    return layers


def _trace_calls(model: nn.Module, shape: tuple[int, ...]) -> list[str]:
    called: dict[str, None] = {}

    def record_call(path: str) -> Any:
        return lambda module, inputs: called.setdefault(path)

    watches = [submodule.register_forward_pre_hook(record_call(path)) for path, submodule in model.named_modules()]
    was_training = model.training
    device = next((value.device for value in model.parameters()), torch.device("cpu"))
    try:
        with registry.without_fused_attention(), torch.no_grad():
            model.eval()(torch.zeros(1, *shape, device=device))
    finally:
        model.train(was_training)
        for watch in watches:
            watch.remove()
    return list(called)


def _names_trained_by_step(model: nn.Module, shape: tuple[int, ...]) -> set[str]:
    model = copy.deepcopy(model).train()
    old_values = {name: value.detach().clone() for name, value in state_without_aliases(model).items()}
    device = next((value.device for value in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        output = model(torch.rand(2, *shape).to(device))  # below 1: token 0, where an example is tokens
        loss = sum(tensor.float().sum() for tensor in _tensors_in(output) if tensor.requires_grad)
        if isinstance(loss, torch.Tensor):
            loss.backward()
    new_state = state_without_aliases(model)
    with_gradient = {name for name, value in new_state.items() if value.grad is not None}
    return with_gradient | {
        name for name, value in new_state.items() if not torch.equal(value.detach(), old_values[name])
    }
