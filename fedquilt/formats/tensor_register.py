"""Register of a network's tensors: kind and module of each, and the call order of modules.

`fedquilt prepare` traces the register into the bundle (`models.networks.traces`). Methods use the register
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
MADE_OF: Final = ".parametrizations."  # in names of tensors that torch makes a layer's tensor of


class RegisterEntry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: Kind  # a counter is a buffer of whole numbers
    module: str  # path of the module that owns it, ""  for the network itself
    layer: str  # the module itself, or of batch normalisation the layer that is called right before it
    type: str  # of the module: torch's class, such as "Conv2d", or "package.Class" of another
    normalises: bool  # whether that module is a normalisation
    trained: bool  # whether training changes the tensor: a parameter by its gradient, a buffer in the forward pass
    aliases: tuple[str, ...] = ()  # further names of the tensor

    @property
    def name_in_module(self) -> str:
        """Name within the module, or of the tensor made from this one (as in weight normalisation)."""
        return self.name.partition(MADE_OF)[2].partition(".")[0] or self.name.rpartition(".")[2]

    @property
    def is_weight(self) -> bool:
        """Whether the tensor is a layer's weight, or a factor that the weight is made of."""
        return self.name_in_module.startswith("weight")


class TensorRegister(msgspec.Struct, frozen=True):
    tensors: tuple[RegisterEntry, ...]
    calls: tuple[str, ...] = ()

    def find_entry(self, name: str) -> RegisterEntry | None:
        return _entries_by_name(self).get(name)

    def parameter_names(self, model: Tensors) -> list[str]:
        """Return the names of the model's tensors that gradients change."""
        return [
            name
            for name in tensor_shapes(model)
            if (entry := self.find_entry(name)) is None or entry.kind == "parameter"
        ]

    def with_aliases(self, model: Tensors) -> dict[str, Any]:
        """Return the model with each tensor under all of its names, as `load_state_dict` wants it."""
        entries_by_alias = {
            alias: name for name in model if (entry := self.find_entry(name)) for alias in entry.aliases
        }
        return {**model, **{alias: model[name] for alias, name in entries_by_alias.items()}}

    def is_coupled(self, model: Collection[str], moved: Collection[str] | None = None) -> bool:
        """Return whether trained batch normalisation couples the examples of a mini-batch.

        Args:
            model: Names of the model's tensors.
            moved: Names of the trained tensors, or None for all. Batch normalisation without trained tensors is frozen.
        """
        norms = [entry for entry in self.tensors if entry.type in BATCH_NORMS and entry.name in model]
        if moved is None:
            return bool(norms)
        learned = {entry.module for entry in norms if entry.kind == "parameter"}
        return any(entry.name in moved or entry.module not in learned for entry in norms)

    def convolution_paths(self, model: Collection[str]) -> set[str]:
        return {entry.module for entry in self.tensors if entry.type in CONVOLUTIONS and entry.name in model}

    def weights_by_module(self) -> dict[str, str]:
        """Return the name of the plain weight of each module that has one."""
        entries = [entry for entry in self.tensors if entry.name_in_module == "weight" and entry.kind == "parameter"]
        return {entry.module: entry.name for entry in entries}

    def linear_paths(self) -> set[str]:
        """Return the paths of the linear layers, without layers that share an earlier layer's weight."""
        return {entry.module for entry in self.tensors if entry.type == "Linear" and entry.is_weight}

    def require_plain_weight(self, layer: str) -> None:
        made_of = [entry.name for entry in self.tensors if entry.module == layer and entry.is_weight]
        if f"{layer}.weight" not in made_of:
            raise ModelError(
                f"the weight of {layer!r} is made of {', '.join(map(repr, made_of))}, and this method needs the weight "
                "itself: give the layer a plain weight, or take another method"
            )

    def running_means_by_variance(self) -> dict[str, str]:
        norms = {entry.name for entry in self.tensors if entry.type in BATCH_NORMS}
        pairs = {f"{entry.module}.running_var": f"{entry.module}.running_mean" for entry in self.tensors}
        return {variance: mean for variance, mean in pairs.items() if {variance, mean} <= norms}

    def is_running_statistic(self, name: str) -> bool:
        """Return whether a tensor is a running statistic: a buffer of floats that the forward pass changes."""
        entry = self.find_entry(name)
        return entry is not None and entry.kind == "buffer" and entry.trained

    def tensors_of_modules(self, modules: Collection[str]) -> set[str]:
        return {entry.name for entry in self.tensors if entry.module in modules}

    def parameters_by_layer(self) -> dict[str, tuple[str, ...]]:
        return dict(_find_layers(self))

    def find_classifier(self) -> str | None:
        """Return the path of the linear layer called last, or None if the network has no linear layer."""
        linear = self.linear_paths()
        borrowed = {alias.rpartition(".")[0]: entry for entry in self.tensors for alias in entry.aliases}
        last_module = self.sort_by_call_order([*linear, *(path for path in borrowed if path in self.calls)])[-1:]
        if not last_module or last_module[0] in linear:
            return last_module[0] if last_module else None
        raise ModelError(
            f"the last layer {last_module[0]!r} shares the tensor {borrowed[last_module[0]].name!r} with "
            "another layer, so it cannot be treated apart as the classifier: give the layer weights of its own, or "
            "take another method"
        )

    def sort_by_call_order(self, names: Iterable[str]) -> list[str]:
        """Return modules or tensors in the order of their module's first call, then of numbers in the name.

        A module that is never called, as its parent uses its weights itself, stands with the nearest module around it.
        """
        positions = _call_positions(self)

        def sort_key(name: str) -> tuple[int, list[tuple[int, int | str]]]:
            path = name
            while path and path not in positions:
                path = path.rpartition(".")[0]
            return positions.get(path, -1), natural_key(name)

        return sorted(names, key=sort_key)


def register_from_table(network: Mapping[str, Any]) -> TensorRegister:
    """Return the register in a network's table, or that of an `mlp`, which follows from its table."""
    if "register" in network:
        return _parse_register(msgspec.json.encode(network["register"]))
    if network.get("name") == "mlp":
        hidden = network.get("hidden", (64,))
        return make_mlp_register(len(hidden) + 1)
    name = network.get("name")
    raise ModelError(f"the bundle has no register of the tensors of {name!r}: run `fedquilt prepare` anew")


def make_mlp_register(layers: int) -> TensorRegister:
    paths = [str(2 * index + 1) for index in range(layers)]
    rows = [
        RegisterEntry(f"{path}.{suffix}", "parameter", path, path, "Linear", normalises=False, trained=True)
        for path in paths
        for suffix in ("weight", "bias")
    ]
    return TensorRegister(tuple(rows), ("", *map(str, range(2 * layers))))


def register_from_kinds(names: Iterable[str], kinds: Mapping[str, Kind]) -> TensorRegister:
    rows = []
    for name in names:
        path = name.rpartition(".")[0]
        rows.append(RegisterEntry(name, kinds.get(name, "parameter"), path, path, "", normalises=False, trained=True))
    return TensorRegister(tuple(rows))


def without_register(network: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in network.items() if key != "register"}


def natural_key(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


@lru_cache(maxsize=8)
def _parse_register(payload: bytes) -> TensorRegister:
    try:
        return msgspec.json.decode(payload, type=TensorRegister)
    except msgspec.MsgspecError as error:
        raise ModelError(f"the bundle's register is damaged ({error}): run `fedquilt prepare` anew") from None


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
