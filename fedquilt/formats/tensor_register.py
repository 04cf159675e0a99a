"""Register of a network's tensors: kind and module of each, and the call order of modules.

`fedquilt prepare` traces the register into the bundle (`fedquilt.models.networks.traces`). Methods use the register
rather than names or shapes. A tensor with several names is in the model once, under the first name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from fedquilt.core import ModelError, Tensors
from fedquilt.core.method import tensor_shapes

Kind = Literal["parameter", "buffer", "counter"]
CONVOLUTIONS: Final = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
BATCH_NORMS: Final = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
ATTENTION: Final = "MultiheadAttention"
PARAMETRIZATION_PATH: Final = ".parametrizations."  # part of the names of tensors from which torch computes a weight


class RegisterEntry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: Kind  # a counter is a buffer of integers
    module: str  # path of the module that owns the tensor, "" for the network itself
    layer: str  # path of the module, or for batch normalisation of the layer called before
    type: str  # class of the module, such as "Conv2d" of torch, or "package.Class"
    normalises: bool  # whether the module is a normalisation
    trained: bool  # whether training changes the tensor: a parameter by its gradient, a buffer in the forward pass
    aliases: tuple[str, ...] = ()  # further names of the tensor

    @property
    def name_in_module(self) -> str:
        """Name of the tensor in its module, or of the weight that torch computes from the tensor."""
        return self.name.partition(PARAMETRIZATION_PATH)[2].partition(".")[0] or self.name.rpartition(".")[2]

    @property
    def is_weight(self) -> bool:
        """Whether the tensor is a layer's weight, or a factor from which the weight is computed."""
        return self.name_in_module.startswith("weight")


class TensorRegister(msgspec.Struct, frozen=True):
    tensors: tuple[RegisterEntry, ...]
    calls: tuple[str, ...] = ()  # paths of modules in the order of their first calls

    def find_entry(self, name: str) -> RegisterEntry | None:
        return _entries_by_name(self).get(name)

    def parameter_names(self, model: Tensors) -> list[str]:
        """Return the names of the model's parameters. Tensors missing in the register count as parameters."""
        return [
            name
            for name in tensor_shapes(model)
            if (entry := self.find_entry(name)) is None or entry.kind == "parameter"
        ]

    def with_aliases(self, model: Tensors) -> dict[str, Any]:
        """Return the model with each tensor under all of its names, as `load_state_dict` requires."""
        names_by_alias = {alias: name for name in model if (entry := self.find_entry(name)) for alias in entry.aliases}
        return {**model, **{alias: model[name] for alias, name in names_by_alias.items()}}

    def is_coupled(self, model: Collection[str], trained_names: Collection[str] | None = None) -> bool:
        """Return whether trained batch normalisation couples the examples of a mini-batch.

        A module without tensors in `trained_names` is frozen, and None trains all modules.
        """
        norm_entries = [entry for entry in self.tensors if entry.type in BATCH_NORMS and entry.name in model]
        if trained_names is None:
            return bool(norm_entries)
        modules_with_parameters = {entry.module for entry in norm_entries if entry.kind == "parameter"}
        return any(entry.name in trained_names or entry.module not in modules_with_parameters for entry in norm_entries)

    def convolution_paths(self, model: Collection[str]) -> set[str]:
        return {entry.module for entry in self.tensors if entry.type in CONVOLUTIONS and entry.name in model}

    def weights_by_module(self) -> dict[str, str]:
        """Return the names of the modules' weights, by module path. Computed weights are left out."""
        entries = [entry for entry in self.tensors if entry.name_in_module == "weight" and entry.kind == "parameter"]
        return {entry.module: entry.name for entry in entries}

    def linear_paths(self) -> set[str]:
        """Return the paths of the linear layers, without layers that share an earlier layer's weight."""
        return {entry.module for entry in self.tensors if entry.type == "Linear" and entry.is_weight}

    def require_plain_weight(self, layer: str) -> None:
        """Raise ModelError if a layer's weight is computed from other tensors, as in weight normalisation."""
        weight_names = [entry.name for entry in self.tensors if entry.module == layer and entry.is_weight]
        if f"{layer}.weight" not in weight_names:
            raise ModelError(
                f"the weight of {layer!r} is computed from {', '.join(map(repr, weight_names))}, but this method "
                "requires a plain weight: remove the parametrization, or choose another method"
            )

    def running_means_by_variance(self) -> dict[str, str]:
        """Return the name of the running mean of each batch norm layer, by the name of the running variance."""
        norm_tensors = {entry.name for entry in self.tensors if entry.type in BATCH_NORMS}
        pairs = {f"{entry.module}.running_var": f"{entry.module}.running_mean" for entry in self.tensors}
        return {variance: mean for variance, mean in pairs.items() if {variance, mean} <= norm_tensors}

    def is_running_statistic(self, name: str) -> bool:
        """Return whether a tensor is a running statistic: a buffer of floats that the forward pass changes."""
        entry = self.find_entry(name)
        return entry is not None and entry.kind == "buffer" and entry.trained

    def tensors_of_modules(self, modules: Collection[str]) -> set[str]:
        return {entry.name for entry in self.tensors if entry.module in modules}

    def parameters_by_layer(self) -> dict[str, tuple[str, ...]]:
        """Return the sorted parameter names of each layer, with the layers in call order."""
        return dict(_find_layers(self))

    def find_classifier(self) -> str | None:
        """Return the path of the linear layer called last, or None. Raise ModelError if its weight is shared."""
        linear_paths = self.linear_paths()
        shared_entries = {alias.rpartition(".")[0]: entry for entry in self.tensors for alias in entry.aliases}
        called_shared_paths = [path for path in shared_entries if path in self.calls]
        last_module = self.sort_by_call_order([*linear_paths, *called_shared_paths])[-1:]
        if not last_module or last_module[0] in linear_paths:
            return last_module[0] if last_module else None
        raise ModelError(
            f"the last layer {last_module[0]!r} shares the tensor {shared_entries[last_module[0]].name!r} with "
            "another layer, so it cannot be trained separately as the classifier: give the layer its own weights, or "
            "choose another method"
        )

    def sort_by_call_order(self, names: Iterable[str]) -> list[str]:
        """Return modules or tensors in the order of their modules' first calls, then by number in the name.

        A module that is never called has the position of the nearest enclosing module that is called.
        """
        positions = _call_positions(self)

        def sort_key(name: str) -> tuple[int, list[tuple[int, int | str]]]:
            path = name
            while path and path not in positions:
                path = path.rpartition(".")[0]
            return positions.get(path, -1), natural_key(name)

        return sorted(names, key=sort_key)


def register_from_table(network: Mapping[str, Any]) -> TensorRegister:
    """Return the register in a network's table or of an `mlp`, or raise ModelError for other networks."""
    if "register" in network:
        return _parse_register(msgspec.json.encode(network["register"]))
    if network.get("name") == "mlp":
        hidden = network.get("hidden", (64,))
        return make_mlp_register(len(hidden) + 1)
    name = network.get("name")
    raise ModelError(f"the bundle has no tensor register of network {name!r}: run `fedquilt prepare` again")


def make_mlp_register(layers: int) -> TensorRegister:
    """Return the register of an `mlp` with `layers` linear layers, separated by activations."""
    paths = [str(2 * index + 1) for index in range(layers)]
    rows = [
        RegisterEntry(f"{path}.{suffix}", "parameter", path, path, "Linear", normalises=False, trained=True)
        for path in paths
        for suffix in ("weight", "bias")
    ]
    return TensorRegister(tuple(rows), ("", *map(str, range(2 * layers))))


def register_from_kinds(names: Iterable[str], kinds: Mapping[str, Kind]) -> TensorRegister:
    """Return a register without layer types and call order. Tensors missing in `kinds` are parameters."""
    rows = []
    for name in names:
        path = name.rpartition(".")[0]
        rows.append(RegisterEntry(name, kinds.get(name, "parameter"), path, path, "", normalises=False, trained=True))
    return TensorRegister(tuple(rows))


def without_register(network: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in network.items() if key != "register"}


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that orders numbers in names by value, "layer.2" before "layer.10"."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


@lru_cache(maxsize=8)
def _parse_register(payload: bytes) -> TensorRegister:
    try:
        return msgspec.json.decode(payload, type=TensorRegister)
    except msgspec.MsgspecError as error:
        raise ModelError(f"the bundle's tensor register is damaged ({error}): run `fedquilt prepare` again") from None


@lru_cache(maxsize=8)
def _entries_by_name(register: TensorRegister) -> dict[str, RegisterEntry]:
    return {entry.name: entry for entry in register.tensors}


@lru_cache(maxsize=8)
def _call_positions(register: TensorRegister) -> dict[str, int]:
    return {path: index for index, path in enumerate(register.calls)}


@lru_cache(maxsize=8)
def _find_layers(register: TensorRegister) -> dict[str, tuple[str, ...]]:
    tensors: dict[str, list[str]] = {}
    for entry in register.tensors:
        if entry.kind == "parameter":
            tensors.setdefault(entry.layer, []).append(entry.name)
    return {path: tuple(sorted(tensors[path])) for path in register.sort_by_call_order(tensors)}
