"""FedSQ: a frozen copy of the pre-trained network sets the gates, and a second copy is trained.

Paper: FedSQ (arXiv 2604.02990), Algorithm 1. DualCopy: Duato et al. (10.1145/3721146.3721950). The pre-trained network
is the structural copy w_SK. The quantitative copy w_QK starts as a copy of it. Its trained modules (the schedule sigma)
compute h_l = 1[z_l(w_SK) > 0] * z_l(w_QK) (`fedquilt.models.partial.dual_copy`), and w_QK is averaged as in FedAvg,
weighted by examples.

Deviations: only trained tensors are sent in each round, and w_SK once. A device caches the outputs of w_SK needed for
training: features before the first trained tensor, and gates in one bit each, which never change. Outputs beyond
`cache_mb` are computed each time. ReLU6 keeps its cap, and leaky ReLU its slope. The result ("dualcopy") contains
w_SK's trained tensors as "gates.NAME", because the deployed network needs both copies. FedProx's term (`mu`) can be
added. `gates = "own"` is FedAvg on the same part, a baseline for FedSQ.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.arrays import tensors
from fedquilt.costs import cost_model
from fedquilt.formats import tensor_register
from fedquilt.formats.tensor_register import BATCH_NORMS, TensorRegister
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState
from fedquilt.models.partial import output_cache

if TYPE_CHECKING:
    from fedquilt.models.partial.dual_copy import DualCopy


TRAITS = replace(fedavg.METHOD.traits, frozen_weights="the choice of units that are on", model_copies=1)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, and those of the two copies."""

    batch: fedavg.Batch = 64
    lr: Annotated[float, Meta(gt=0)] = 0.01
    weight_decay: Annotated[float, Meta(ge=0)] = 1e-4
    trained: tuple[str, ...] = ()  # sigma: modules that are trained; []: the schedule of `prepare`, else all
    bn: Literal["frozen_stats", "train"] = "frozen_stats"  # batch norm; frozen_stats trains gamma and beta only
    pool: Literal["own", "sk"] = "own"  # whether max pooling, too, follows w_SK
    gates: Literal["frozen", "own"] = "frozen"  # own: no gates; FedAvg on the trained part
    mu: Annotated[float, Meta(ge=0)] = 0.0  # mu of FedProx's term; 0: without
    cache: Literal["float32", "float16", "off"] = "float32"  # precision of cached features
    cache_mb: Annotated[int, Meta(ge=0)] = 1024  # largest cache of a job on a device, held-out examples included

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment and self.cache != "off":
            raise ValueError('augment is not possible while FedSQ caches features of the examples: set cache = "off"')


@dataclass(frozen=True)
class State(NetworkState):
    """Tensors of the trained copy w_QK as `model`, and the frozen pre-trained network w_SK."""

    frozen: dict[str, np.ndarray]  # w_SK, whole


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state: the bundle's network as the frozen copy, and the trained tensors.

    Raises:
        ModelError: If `trained` names an unknown module or leaves nothing to train, or if the network is not separable.
    """
    initial = fedavg.init(bundle, params, seed)
    schedule = bundle.meta.get("schedule") or {}
    trained = list(params.trained or schedule.get("trained") or sorted({name.split(".")[0] for name in initial.model}))
    for module in trained:
        if not any(is_trained([module], name) for name in initial.model):
            module_names = ", ".join(sorted({name.split(".")[0] for name in initial.model}))
            raise core.ModelError(
                f"trained = {module!r} is not a module of the network: choose among {module_names} and their parts"
            )
    require_separable(initial.register)
    model = tensors_to_send(initial, trained, params.bn)
    if not model:
        raise core.ModelError(
            f"trained = {', '.join(trained)} has no tensors to train with bn = {params.bn!r}: add modules"
        )
    trained_state = replace(initial, model=model, params={**initial.params, "trained": trained})
    return State(**vars(trained_state), frozen=initial.model)


def is_trained(trained: list[str], name: str) -> bool:
    """Return whether a tensor is listed in `trained`, or belongs to a module listed there."""
    return any(name == module or name.startswith(module + ".") for module in trained)


def require_separable(register: TensorRegister) -> None:
    """Raise ModelError if modules share a tensor, or any but batch norm has running statistics."""
    for entry in register.tensors:
        if entry.aliases:
            raise core.ModelError(
                f"tensor {entry.name!r} is shared with {entry.aliases[0]!r}, but FedSQ trains a copy of some modules "
                "only: give each module its own tensors, or choose another method"
            )
        if register.is_running_statistic(entry.name) and entry.type not in BATCH_NORMS:
            raise core.ModelError(
                f"tensor {entry.name!r} is a running statistic of {entry.type}, which FedSQ does not support: use "
                "torch's batch norm, or choose another method"
            )


def tensors_to_send(initial: NetworkState, trained: list[str], bn: str) -> dict[str, np.ndarray]:
    """Return the trained modules' tensors, and their batch norm statistics if `bn` is "train"."""
    entries = [entry for entry in initial.register.tensors if is_trained(trained, entry.name)]
    names = [
        trained_entry.name
        for trained_entry in entries
        if bn == "train" or trained_entry.kind == "parameter" or not trained_entry.normalises
    ]
    return {name: initial.model[name] for name in names}


def send(state: State, device: core.DeviceView) -> core.TaskSpec:
    """Return the task spec to train the tensors of w_QK. The frozen copy w_SK is sent once.

    With a cache the frozen part runs only in a device's first round, once for each example. Without a cache w_SK runs
    in every epoch. The prediction ignores `cache_mb`, because only the device knows the size of its examples.
    """
    full_state = replace(state, model=state.frozen)  # for the size in memory
    full_task_spec = local_training.training_task_spec(
        full_state, {"model": state.model, "frozen": state.frozen}, TRAITS
    )
    if not state.layers:
        return full_task_spec
    tail_state = replace(full_state, layers=cost_model.split_at_trained(state.layers, state.model)[1])
    cached, is_first_round = state.params["cache"] != "off", not device.rounds
    tail_task_spec = local_training.training_task_spec(tail_state, {}, trained_tensors=state.model)
    frozen_work = local_training.evaluation_work(full_state)  # a forward pass of w_SK
    epochs = 1 if cached else int(state.params["epochs"])
    work, check = tail_task_spec.work, tail_task_spec.check or frozen_work
    if is_first_round or not cached:
        work = work.add(cost_model.repeat_work(frozen_work, epochs))
        check = check.add(frozen_work)
    return replace(
        full_task_spec, work=msgspec.structs.replace(work, peak_bytes=full_task_spec.work.peak_bytes), check=check
    )


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Train the copy w_QK, gated by the frozen copy w_SK, with cached features and gates if they fit."""
    received, copies = site.load("model"), _Copies(task, site)
    examples, start, hooks, cached_bytes = copies.prepare_run(received, site.train, "train")
    trained_names = {f"qk.{name}" for name in copies.dual.trained}
    mu = task.params["mu"]
    hooks = replace(
        hooks,
        correct_gradient=(lambda gradient, value, anchors: gradient + mu * (value - anchors["start"])) if mu else None,
        steps=(core.Step(rate=lambda name: float(name in trained_names)),),
    )
    trained, metrics = site.engine.train(
        task.params["network"],
        start,
        examples,
        local_training.fit_from_task(task),
        site.rng,
        hooks=hooks,
        progress=site.progress,
    )
    model = {name: trained.get(f"qk.{name}", array) for name, array in received.items()}
    return core.ClientResult({"model": model}, float(len(site.train)), {**metrics, "cached_bytes": float(cached_bytes)})


def check(task: core.Task, site: core.ClientContext) -> core.EvaluationSums:
    """Evaluate the trained copy w_QK, gated by the frozen copy w_SK, on the held-out examples."""
    if not len(site.held_out):
        return core.EvaluationSums(examples=0)
    examples, start, hooks, _ = _Copies(task, site).prepare_run(site.load("model"), site.held_out, "held")
    return site.engine.evaluate(task.params["network"], start, examples, hooks=hooks)


def result(state: State) -> core.Artefact:
    """Return both copies of the network or, with gates = "own", the trained network alone."""
    meta = {"network": tensor_register.without_register(state.network), "trained": state.params["trained"]}
    trained = {**state.frozen, **state.model}
    if state.params["gates"] == "own":
        return core.Artefact("weights", meta, trained)
    return core.Artefact("dualcopy", meta, {**trained, **{f"gates.{name}": state.frozen[name] for name in state.model}})


class _Copies:
    """Frozen and trained copy of the network (`dual_copy`), with a cache of the frozen copy's outputs."""

    def __init__(self, task: core.Task, site: core.ClientContext) -> None:
        from fedquilt.models.partial import dual_copy  # torch

        self._task, self._site = task, site
        params = task.params
        self.dual: DualCopy = dual_copy.cached_dual_copy(
            params["network"], params["trained"], gates=params["gates"], bn=params["bn"], pool=params["pool"]
        )
        self._frozen = site.load("frozen")

    def prepare_run(
        self, received: core.Tensors, examples: core.Examples, split: str
    ) -> tuple[core.Examples, core.Tensors, core.Hooks, int]:
        """Return examples, tensors and hooks for the engine, and the bytes of cached features (0 if none)."""
        tensors.require_matching(received, {name: self._frozen[name] for name in received if name in self._frozen})
        quantitative = {f"qk.{name}": received.get(name, self._frozen[name]) for name in self.dual.names}
        metadata = None if self._task.params["cache"] == "off" else self._find_or_cache_rows(examples, split)
        if metadata is None:
            start = {**quantitative, **{f"frozen.{name}": self._frozen[name] for name in self.dual.frozen_names}}
            return examples, start, core.Hooks(prepare=self.dual.build_copy_pair), 0
        layout = metadata.layout
        rows: Any = output_cache.CachedRows(self._site.cache / f"{split}.rows", metadata)
        hooks = core.Hooks(prepare=lambda model: self.dual.build_tail(model, layout), inputs=lambda x: x)
        return core.Examples(rows, examples.y), quantitative, hooks, metadata.rows * layout.row_bytes

    def _find_or_cache_rows(self, examples: core.Examples, split: str) -> output_cache.CacheMetadata | None:
        """Compute missing outputs. Return the cache's metadata, or None if the outputs exceed `cache_mb`."""
        folder, params = self._site.cache, self._task.params
        key = self._make_cache_key(examples)
        if (metadata := output_cache.find_complete_rows(folder, split, key, len(examples))) is not None:
            return metadata
        other_bytes = sum(path.stat().st_size for path in folder.glob("*.rows") if path.stem != split)
        writer = output_cache.RowWriter(
            folder,
            split,
            len(examples),
            is_float16=params["cache"] == "float16",
            limit_bytes=params["cache_mb"] * 10**6 - other_bytes,
        )

        def write_rows(outputs: output_cache.BatchOutputs) -> None:
            writer.write_batch(outputs)
            self._site.progress(0.0)

        start = {f"frozen.{name}": self._frozen[name] for name in self.dual.all_names}
        try:
            hooks = core.Hooks(prepare=lambda model: self.dual.build_observer(model, write_rows))
            self._site.engine.evaluate(params["network"], start, examples, hooks=hooks)
            return writer.finish(key)
        except output_cache.NoRoomError:
            return None

    def _make_cache_key(self, examples: core.Examples) -> str:
        settings = {name: self._task.params[name] for name in ("network", "trained", "gates", "pool", "cache")}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for name in sorted(self._frozen):
            digest.update(np.ascontiguousarray(self._frozen[name]).data if self._frozen[name].size else b"")
        digest.update(f"{examples.x.shape} {examples.x.dtype}".encode())
        digest.update(np.ascontiguousarray(examples.x).data)
        return digest.hexdigest()


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 2604.02990",
    params=Params,
    state=State,
    engines=("torch",),
    init=init,
    send=send,
    common_task=False,
    work=work,
    check=check,
    result=result,
    traits=TRAITS,
)
