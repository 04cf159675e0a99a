"""Traces of networks: operations by torch.fx, costs of layers, and the register of tensors. Requires torch."""

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
from fedquilt.formats.tensor_register import ATTENTION, MADE_OF, Kind, RegisterEntry, TensorRegister
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


def trace_network(model: nn.Module, what: str, fix: str) -> fx.GraphModule:
    """Trace a network with torch.fx, or raise ModelError with `what`, the untraceable place and `fix`."""
    tracer = _PathTracer()
    try:
        graph = tracer.trace(model)
    except Exception as error:  # whatever the network's own code makes of a symbolic value
        module = model.get_submodule(tracer.failed)
        named = f"module {tracer.failed!r}" if tracer.failed else "the network's own forward()"
        reason = first_line(error)
        raise ModelError(
            f"{what} cannot be traced: {named} ({type(module).__name__}{_error_location(error)}) stops torch.fx: "
            f"{reason}; rewrite that place without branches on values, or {fix}"
        ) from None
    return fx.GraphModule(model, graph)


def _error_location(error: Exception) -> str:
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _TORCH not in Path(each.filename).parents]
    last = frames[-1]
    return "" if Path(last.filename) == Path(__file__) else f", {Path(last.filename).name}, line {last.lineno}"


def trace_layer_costs(model: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """Return the cost of each layer for one example of `shape`, in the order of first use.

    In evaluation mode, as `calls.trace`, but with gradients: without them torch runs a transformer's layers by kernels
    of their own, which training does not use.
    """
    counter = _OperationCounter(model)
    was_training = model.training
    place = next((value.device for value in model.parameters()), torch.device("cpu"))
    try:
        x = torch.zeros(1, *shape, device=place)
        with torch.enable_grad(), counter:
            model.eval()(x)
    finally:
        model.train(was_training)
        counter.remove_hooks()
    return [Layer(path, *numbers) for path, numbers in counter.found.items()]


class _OperationCounter(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
        self._running = [""]
        self.found: dict[str, list[Any]] = {}
        self._watches = []
        for path, each in model.named_modules():
            self._watches.append(each.register_forward_pre_hook(lambda _, given, path=path: self._running.append(path)))
            self._watches.append(each.register_forward_hook(lambda _, given, made: self._leave_module()))

    def remove_hooks(self) -> None:
        for watch in self._watches:
            watch.remove()

    def _leave_module(self) -> None:
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view:
            return made
        row = self.found.setdefault(self._running[-1], [0.0, 0.0, 0.0, 0])
        given = [value for value in _tensors_in((args, kwargs)) if value.untyped_storage().data_ptr() not in self._own]
        weighted = len(given) < len(_tensors_in((args, kwargs)))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            row[0 if weighted else 1] += float(count(*args, **(kwargs or {}), out_val=made))
        row[2] += float(sum(value.nbytes for value in (*given, *_tensors_in(made))))
        row[3] += 1
        return made


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def register_from_table(network: Mapping[str, Any]) -> TensorRegister:
    return trace_register(registry.build_network(network), registry.input_shape(network))


def trace_register(model: nn.Module, shape: tuple[int, ...]) -> TensorRegister:
    """Return the register of a network: its tensors, and its modules in the order of their first call.

    The calls are those of an example of this shape (without batch) in evaluation mode. Trained tensors are those that a
    training step with two examples, on a copy of the network, changes or gives a gradient.
    """
    modules, named, state = dict(model.named_modules()), _tensor_names_by_id(model), state_without_aliases(model)
    moved, calls = _names_trained_by_step(model, shape), _trace_calls(model, shape)
    layers, rows = _layers_before_norms(modules, calls), []
    for name, value in state.items():
        path = name.partition(MADE_OF)[0] if MADE_OF in name else name.rpartition(".")[0]
        module = modules[path]
        parameter = isinstance(value, nn.Parameter)
        kind: Kind = "parameter" if parameter else "buffer" if value.is_floating_point() else "counter"
        held = [each for each in module.buffers(recurse=False) if id(each) in named]  # the others are not in the state
        running = [named[id(each)][0] in moved for each in held if each.is_floating_point()]
        normalises = isinstance(module, _NORMS) or (any(running) and not any(module.children()))
        facts = (kind, path, layers.get(path, path), _nearest_torch_type_name(module), normalises, name in moved)
        rows.append(RegisterEntry(name, *facts, tuple(named[id(value)][1:])))
    return TensorRegister(tuple(rows), tuple(calls))


def state_without_aliases(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    first = {same[0] for same in names_of_tensors(model)}
    return {name: value for name, value in state.items() if name in first}


def names_of_tensors(model: nn.Module) -> list[list[str]]:
    return list(_tensor_names_by_id(model).values())


def state_names_by_alias(model: nn.Module) -> dict[str, str]:
    """Return the first state-dict name of each module's own tensors, by the tensor's name in that module."""
    found: dict[str, str] = {}
    named = _tensor_names_by_id(model)
    for path, module in model.named_modules():
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        found |= {f"{path}.{leaf}" if path else leaf: named[id(v)][0] for leaf, v in own.items() if id(v) in named}
    return found


def modules_sharing_weight(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    weight = model.get_submodule(path).weight
    every = model.named_modules(remove_duplicate=False)
    return [(other, each) for other, each in every if getattr(each, "weight", None) is weight]


def _tensor_names_by_id(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        found.setdefault(id(value), []).append(name)
    return found


def _nearest_torch_type_name(module: nn.Module) -> str:
    if isinstance(module, Attention):
        return ATTENTION
    for kind in type(module).__mro__:
        if kind is not nn.Module and getattr(nn, kind.__name__, None) is kind:
            return kind.__name__
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _layers_before_norms(modules: Mapping[str, nn.Module], calls: Sequence[str]) -> dict[str, str]:
    found, before = {}, ""
    for path in calls:
        module = modules[path]
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            last = modules[before]
            if module.num_features == getattr(last, "out_channels", getattr(last, "out_features", None)):
                found[path] = before
        if not any(module.children()):
            before = path
    return found


def _trace_calls(model: nn.Module, shape: tuple[int, ...]) -> list[str]:
    called: dict[str, None] = {}

    def record_call(path: str) -> Any:
        return lambda module, inputs: called.setdefault(path)

    watches = [each.register_forward_pre_hook(record_call(path)) for path, each in model.named_modules()]
    was_training = model.training
    place = next((value.device for value in model.parameters()), torch.device("cpu"))
    try:
        with registry.without_fused_attention(), torch.no_grad():
            model.eval()(torch.zeros(1, *shape, device=place))
    finally:
        model.train(was_training)
        for watch in watches:
            watch.remove()
    return list(called)


def _names_trained_by_step(model: nn.Module, shape: tuple[int, ...]) -> set[str]:
    model = copy.deepcopy(model).train()
    before = {name: value.detach().clone() for name, value in state_without_aliases(model).items()}
    place = next((value.device for value in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        told = model(torch.rand(2, *shape).to(place))  # below 1: token 0, where an example is tokens
        loss = sum(each.float().sum() for each in _tensors_in(told) if each.requires_grad)
        if isinstance(loss, torch.Tensor):
            loss.backward()
    after = state_without_aliases(model)
    moved = {name for name, value in after.items() if value.grad is not None}
    return moved | {name for name, value in after.items() if not torch.equal(value.detach(), before[name])}
