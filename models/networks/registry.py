"""Construction of networks by name, with their weights and costs. torch is imported on demand.

A network is a table, `{"name": "mlp", "inputs": 64, "hidden": [32], "classes": 10}`. Names are the functions of
`fedquilt.models.networks.architectures`, `resnet20-cifar` (32, 44, 56),
`torchvision/<architecture>`, `exits` around another network's table (`models.networks.stages`, the result of DepthFL),
an entry point of another package (`fedquilt.networks`), or `module:function` (`fedquilt.plugins`). The keys
"input" (`fedquilt.data.inputs`), "register" (`fedquilt.formats.tensor_register`) and "task" (`fedquilt.metrics`)
describe inputs, tensors and predictions. They are ignored when the network is built. With the tasks "regression" and
"labels", `classes` is the number of outputs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedquilt import plugins
from fedquilt.core import JobError, ModelError
from fedquilt.core.errors import first_line

if TYPE_CHECKING:
    import torch
    from torch import nn

ARCHITECTURES = (
    *("cnn", "conv1d", "gru", "lenet", "mlp", "plain"),
    *("residual", "rezero", "separable", "transformer", "vit"),
)
CIFAR_DEPTHS = (20, 32, 44, 56)
BUILTIN_NETWORKS = (
    *ARCHITECTURES,
    "exits",
    *(f"resnet{depth}-cifar" for depth in CIFAR_DEPTHS),
    "torchvision/<architecture>",
)


class NetworkCost(NamedTuple):
    """Cost of one example's forward pass. A multiply-add is 2 FLOPs."""

    flops: float
    parameters: int


def build_network(network: Mapping[str, Any]) -> nn.Module:
    """Return a network with random weights, in training mode. Seed torch to repeat the weights.

    Raise ModelError for an unknown name, or settings with which the network cannot be built.
    """
    table = dict(network)
    name = str(table.pop("name", ""))
    for key in ("input", "register", "task"):
        table.pop(key, None)
    factory = _find_factory(name)
    if "classes" in table and name.startswith("torchvision/"):
        table["num_classes"] = table.pop("classes")
    table = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    try:
        inspect.signature(factory).bind(**table)
        model = factory(**table)
    except (TypeError, ValueError) as error:
        raise ModelError(f"network {name!r} cannot be built from {describe_settings(network)}: {error}") from None
    if not hasattr(model, "state_dict"):
        raise ModelError(f"network {name!r}: the function returned a {type(model).__name__}, not a torch.nn.Module")
    _initialise_lazy_tensors(model, network)
    return model


def _initialise_lazy_tensors(model: nn.Module, network: Mapping[str, Any]) -> None:
    import torch
    from torch.nn.parameter import is_lazy

    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        shape = input_shape(network)
        try:
            with torch.no_grad():
                model.eval()(torch.zeros(1, *shape))
        except Exception as error:  # a module from outside may raise anything
            raise ModelError(
                f"network {network.get('name')!r} has lazy modules, but does not run on an example of shape {shape} "
                f"({first_line(error)}): correct the sizes in [model]"
            ) from None
        model.train()


def load_network(network: Mapping[str, Any], weights: str | Path | None = None, *, seed: int = 0) -> nn.Module:
    """Build a network with weights, in evaluation mode.

    Args:
        network: Table of the network.
        weights: None for random weights, the name of torchvision's weights such as "DEFAULT" (downloaded by
            torchvision), or a file: `.safetensors`, or a state dict of `torch.save` (`.pt`, `.pth`, `.th`), read
            without running its code.
        seed: Seed of random weights.

    Raises:
        ModelError: If the network cannot be built, or the weights are missing, unreadable or of other shapes.
    """
    import torch

    name = str(network.get("name", ""))
    if weights is None or _is_file(weights):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_network(network)
        if weights is not None:
            _load_weights_file(model, name, Path(weights))
    elif name.startswith("torchvision/"):
        model = _download_model(name, network, str(weights))
    else:
        raise ModelError(f"weights {str(weights)!r} of network {name!r}: no such file")
    return model.eval()


def measure_cost(model: nn.Module, shape: tuple[int, ...]) -> NetworkCost:
    """Run the network on an example of `shape` and return the cost. Errors of the network propagate."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    was_training = model.training
    with (
        without_fused_attention(),
        sdpa_kernel(SDPBackend.MATH),
        torch.no_grad(),
        _disable_parameter_gradients(model),
        counter,
    ):
        model.eval()(torch.zeros(1, *shape))
    model.train(was_training)
    return NetworkCost(float(counter.get_total_flops()), sum(p.numel() for p in model.parameters()))


@contextlib.contextmanager
def _disable_parameter_gradients(model: nn.Module) -> Iterator[None]:
    trainable = [value for value in model.parameters() if value.requires_grad]
    try:
        for value in trainable:
            value.requires_grad_(False)
        yield
    finally:
        for value in trainable:
            value.requires_grad_()


@contextlib.contextmanager
def without_fused_attention() -> Iterator[None]:
    """Disable the fused kernel of `nn.MultiheadAttention` in evaluation mode.

    The fused kernel has no ONNX operation, and torch's FLOP counter ignores the kernel.
    """
    import torch

    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def input_shape(network: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of one example, from the table's "input" or from its other settings."""
    for table in (network.get("input", {}), network):
        if "channels" in table and "size" in table:
            return (int(table["channels"]), int(table["size"]), int(table["size"]))
    if network.get("name") == "transformer":
        return (int(network["length"]),)
    if "channels" in network and "steps" in network:
        return (int(network["steps"]), int(network["channels"]))
    if isinstance(network.get("inputs"), int):
        return (network["inputs"],)
    if network.get("name") == "exits":
        return input_shape(network["of"])
    raise ModelError(
        f"network {network.get('name')!r} has no input shape: set channels and size in [input], or in [model] channels "
        "and steps, or inputs"
    )


# -- names ----------------------------------------------------------------------------------------


def required_plugins(network: Mapping[str, Any]) -> dict[str, str]:
    """Return the plug-in modules of a network and of nested tables, with version and digest."""
    modules: dict[str, str] = {}
    for name in list_plugin_networks(network):
        find = functools.partial(plugins.required_modules, "network", name, BUILTIN_NETWORKS)
        modules |= _call_with_model_errors(find)
    return modules


def list_plugin_networks(network: Mapping[str, Any]) -> list[str]:
    name = str(network.get("name", ""))
    nested_names = [
        nested_name
        for value in network.values()
        if isinstance(value, Mapping)
        for nested_name in list_plugin_networks(value)
    ]
    is_builtin = not name or name in BUILTIN_NETWORKS or name.startswith("torchvision/")
    return nested_names if is_builtin else [name, *nested_names]


def _call_with_model_errors(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except JobError as error:
        raise ModelError(str(error)) from None


def _find_factory(name: str) -> Callable[..., nn.Module]:
    if name.startswith("torchvision/"):
        return _find_torchvision_factory(name)
    plugin = _call_with_model_errors(lambda: plugins.load_plugin("network", name, BUILTIN_NETWORKS))
    if plugin is not None:
        return _wrap_plugin_factory(name, plugin)
    from fedquilt.models.networks import architectures, stages

    def build_exits(of: Mapping[str, Any], looks: Sequence[Sequence[Any]], classes: int) -> nn.Module:
        return stages.build_exits_network(build_network(of), looks, classes)

    if name == "exits":
        return build_exits
    if name in ARCHITECTURES:
        return getattr(architectures, name)
    return functools.partial(architectures.CifarResNet, int(name.removeprefix("resnet").removesuffix("-cifar")))


def require_callable(name: str, factory: Any) -> None:
    if not callable(factory):
        kind = type(factory).__name__
        raise ModelError(f"network {name!r} is a {kind}, not a function that returns a torch.nn.Module")


def describe_settings(network: Mapping[str, Any]) -> str:
    settings = {key: value for key, value in network.items() if key not in ("name", "input", "register", "task")}
    return ", ".join(f"{key} = {value!r}" for key, value in settings.items()) or "no settings"


def _wrap_plugin_factory(name: str, factory: Any) -> Callable[..., nn.Module]:
    require_callable(name, factory)
    signature = inspect.signature(factory)

    def build_plugin(**table: Any) -> nn.Module:
        try:
            return factory(**table)
        except Exception as error:  # code from outside may raise anything
            raise ModelError(
                f"network {name!r} cannot be built from {describe_settings(table)}: {type(error).__name__}: {error}"
            ) from None

    build_plugin.__signature__ = signature  # type: ignore[attr-defined]
    return build_plugin


def _find_torchvision_factory(name: str) -> Callable[..., nn.Module]:
    from fedquilt.host.torchvision_compat import import_torchvision

    architecture = name.removeprefix("torchvision/")
    try:
        builder: Callable[..., nn.Module] = import_torchvision().models.get_model_builder(architecture)
    except ValueError:
        raise ModelError(
            f"torchvision has no architecture {architecture!r}: see torchvision.models.list_models()"
        ) from None
    quiet = {"init_weights": False} if architecture in ("googlenet", "inception_v3") else {}
    return lambda num_classes=1000: builder(num_classes=num_classes, **quiet)


# -- weights --------------------------------------------------------------------------------------


def _is_file(weights: str | Path) -> bool:
    return isinstance(weights, Path) or Path(weights).suffix in (".pt", ".pth", ".th", ".safetensors")


def _load_weights_file(model: nn.Module, name: str, path: Path) -> None:
    weights = _read_state_dict(path)
    network_state = model.state_dict()
    # batch norm's counters are absent from many published files and unused in inference
    weights |= {
        key: network_state[key]
        for key in network_state.keys() - weights.keys()
        if not network_state[key].is_floating_point()
    }
    odd = sorted(key for key in weights.keys() ^ network_state.keys())
    odd += sorted(k for k in weights.keys() & network_state.keys() if weights[k].shape != network_state[k].shape)
    if odd:
        raise ModelError(
            f"weights {path} do not fit network {name!r}: {len(odd)} tensors differ, the first is {odd[0]!r}; "
            "use the file's own network and number of classes"
        )
    model.load_state_dict(weights)


def _read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    import torch

    if not path.is_file():
        raise ModelError(f"weights {path}: no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise a dozen types for a damaged file
        reason = first_line(error)
        raise ModelError(f"cannot read the weights {path}: {reason}; save a plain state dict") from None
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ModelError(f"weights {path} are a {type(state).__name__}, not a state dict: save model.state_dict()")
    return {str(key).removeprefix("module."): value for key, value in state.items()}


def _download_model(name: str, network: Mapping[str, Any], weights: str) -> nn.Module:
    from fedquilt.host.torchvision_compat import import_torchvision

    _find_torchvision_factory(name)
    architecture, classes = name.removeprefix("torchvision/"), int(network.get("classes", 1000))
    if classes != 1000:
        raise ModelError(f"torchvision's weights of {name} are for 1000 classes, not {classes}: remove `classes`")
    try:
        model: nn.Module = import_torchvision().models.get_model(architecture, weights=weights)
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{name} has no weights {weights!r} ({error}): set DEFAULT, or a file") from None
    except OSError as error:
        raise ModelError(f"cannot download the weights of {name} ({error}): use a local file instead") from None
    return model
