"""Interface of a federated method: both halves, and the values they take and return."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from fedquilt.core.messages import BlobRef, EvaluationSums, Profile, Task, WorkEstimate

if TYPE_CHECKING:
    import numpy as np

    Tensors: TypeAlias = Mapping[str, np.ndarray]  # "layer1.0.conv1.weight" -> array
else:  # the agent daemon holds no numpy: 17 MB it never uses
    Tensors = Mapping


@dataclass(frozen=True)
class DeviceView:
    """Latest profile of a device and the rounds in which the device took part."""

    device: str
    profile: Profile | None
    rounds: Sequence[int] = ()  # rounds of this job it has contributed to, oldest first


@dataclass(frozen=True)
class TaskSpec:
    """Task for one device in one round. A bundle is tensors or the reference of a stored blob."""

    params: Mapping[str, Any]
    bundles: Mapping[str, Tensors | BlobRef]
    work: WorkEstimate = WorkEstimate()
    held_out: bool = False  # whether the work's examples are the held-out ones, not those to train on
    check: WorkEstimate | None = (
        None  # of an evaluation on as many examples as the device trains on; None: not predicted
    )


@dataclass(frozen=True)
class Bundle:
    """Output of `fedquilt prepare` for a job: metadata and files by name."""

    meta: Mapping[str, Any]
    files: Mapping[str, BlobRef]
    load: Callable[[str], Tensors]  # the tensors of one safetensors file in it


@dataclass(frozen=True)
class Examples:
    """Labelled examples: inputs `x` and targets `y`.

    `x` is (n, ...) as stored: uint8 (n, h, w) or (n, h, w, c), float32 (n, features) or (n, steps, channels),
    int32 (n, tokens). `y` is by task: classes (n,) int64, regression (n, k) float32, labels (n, k) uint8 of 0 and 1.
    """

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ClientContext:
    """Inputs of a client half: examples, tensors, engine and random generator."""

    device: str
    budget_bytes: int
    engine: Any  # one of fedquilt.edge_agent.engines
    rng: np.random.Generator  # keyed by (seed, job, round, device)
    train: Examples  # the board's own examples
    held: Examples  # held-out share: evaluation only
    local: Tensors  # private per-job state: kept on the board, never sent
    load: Callable[[str], Tensors]  # bundle name -> tensors, read on demand
    path: Callable[[str], Path]  # bundle name -> file on disk (an ONNX graph, say)
    cache_at: Path | str  # the folder that `cache` makes when it is first used: most methods need none
    progress: Callable[[float], None] = lambda fraction: None  # 0..1; raises when the task is cancelled
    lost: str = ""  # why `local` is empty although earlier rounds left private state here; "": it is not

    @property
    def cache(self) -> Path:
        """Folder for files of this job on the device, created on demand and never sent.

        The files may be gone at the next task.

        Raises:
            OSError: If the folder cannot be created.
        """
        folder = Path(self.cache_at)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass(frozen=True)
class ClientResult:
    """Return value of a client half: the bundles to send and the private state that stays."""

    bundles: Mapping[str, Tensors]
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    local: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceUpdate:
    """Update of a device with its tensors: the argument of `Method.fold`.

    Tensors of a large update are read from the disk at each access and are not kept in memory.
    """

    device: str
    round: int
    weight: float
    metrics: Mapping[str, float]
    bundles: Mapping[str, Tensors]


def tensor_shapes(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tensors by name for reading shapes and dtypes only, without loading files."""
    found: Mapping[str, Any] = getattr(tensors, "shapes", tensors)
    return found


@dataclass(frozen=True)
class UpdateSchema:
    """Names, shapes and dtypes of the tensors that an update may contain.

    The manifest of an update is checked against the schema before any blob is fetched.
    """

    bundles: Mapping[str, Mapping[str, Any]]  # bundle -> tensors: arrays, or anything with a shape and a dtype
    whole: bool = True  # all of it and exactly so; else any part: fewer bundles, fewer tensors, fewer entries in each


Fold = TypeVar("Fold", bound=Callable[..., Any])
Sound: TypeAlias = Callable[[Any, Any, float], None]


def with_update_schema(known: Callable[[Any], UpdateSchema | None]) -> Callable[[Fold], Fold]:
    """Decorate a `Method.fold` with the schema of the updates that the fold accepts.

    The schema belongs to the fold: a method that reuses the rest of another method does not inherit the schema.

    Args:
        known: Function of the state, which returns None if the schema is not known in advance.
    """

    def decorate(fold: Fold) -> Fold:
        fold.__dict__["expected"] = known
        return fold

    return decorate


def update_schema(fold: Callable[..., Any], state: Any) -> UpdateSchema | None:
    """Return the schema of the updates that a fold accepts, or None if unknown."""
    known = getattr(fold, "expected", None)
    return None if known is None else known(state)


def with_mergeable_accumulators(
    kind: type | Callable[[Any], type | None], sound: Sound | None = None
) -> Callable[[Fold], Fold]:
    """Decorate a `Method.fold` whose accumulators consist of exact sums and device counts.

    Updates are then folded in any order, and `fedquilt.arrays.exact_sums.join` merges accumulators of different
    devices. A fold that rejects an update leaves the accumulator unchanged.

    Args:
        kind: The type of the accumulators, or a function of the state that returns None if they cannot be merged.
        sound: A function `sound(state, total, weight)` that raises UpdateError unless `total` can be the accumulator of
            a site's devices with this total weight. Without this function, sites cannot take part.
    """

    def decorate(fold: Fold) -> Fold:
        of = (lambda state: kind) if isinstance(kind, type) else kind
        fold.__dict__["adds_up"], fold.__dict__["sound"] = of, sound
        return fold

    return decorate


def mergeable_type(fold: Callable[..., Any], state: Any) -> type | None:
    """Return the type of a fold's accumulators in a state, or None if they cannot be merged."""
    kind: Callable[[Any], type | None] | None = getattr(fold, "adds_up", None)
    return None if kind is None else kind(state)


def with_update_check(require: Callable[[Any, DeviceUpdate], None]) -> Callable[[Fold], Fold]:
    """Decorate a `Method.fold` with a check of updates that requires no accumulator.

    The fold must call the check before it changes the accumulator.

    Args:
        require: A function `require(state, update)` that raises UpdateError for an invalid update.
    """

    def decorate(fold: Fold) -> Fold:
        fold.__dict__["require"] = require
        return fold

    return decorate


def accumulator_check(fold: Callable[..., Any]) -> Sound | None:
    """Return the check of a site's accumulators, or None if the method accepts no sites."""
    return getattr(fold, "sound", None)


def with_task_key(key: Callable[[DeviceView], Hashable]) -> Callable[[Fold], Fold]:
    """Decorate a `Method.send` that returns equal tasks for devices with equal keys.

    In a round, `Method.send` is then called once for each key.
    """

    def decorate(send: Fold) -> Fold:
        send.__dict__["same_for"] = key
        return send

    return decorate


def require_valid_update(fold: Callable[..., Any], state: Any, update: DeviceUpdate) -> None:
    """Raise UpdateError if a fold would reject an update.

    Raises:
        UpdateError: If the update is invalid in this state.
    """
    require = getattr(fold, "require", None)
    if require is None:
        fold(state, None, update)
    else:
        require(state, update)


def with_common_task(send: Fold) -> Fold:
    """Decorate a `Method.send` that returns the same task for all devices of a round."""
    return with_task_key(lambda device: None)(send)


def task_key(send: Callable[..., Any]) -> Callable[[DeviceView], Hashable] | None:
    """Return the key of devices with equal tasks, or None if tasks are made for each device."""
    return getattr(send, "same_for", None)


@dataclass(frozen=True)
class Artefact:
    """Result of a finished job: metadata and tensors, as written by `fedquilt export`."""

    kind: str  # "weights" | "stitched" | "dualcopy"
    meta: Mapping[str, Any]
    tensors: Tensors


@dataclass(frozen=True)
class EvaluationRound:
    """Server half of an evaluation round, which collects data for the evaluation of a state.

    The tasks of an evaluation round are run by `Method.work`, which recognises them by their parameters. An evaluation
    round precedes each evaluation and the end of a job, does not count as a round of the job, and selects every
    available device.
    """

    wanted: Callable[[Any], bool]  # (S) -> whether states of this job need it: called once, with the first
    send: Callable[[Any, DeviceView], TaskSpec | None]  # as of `Method`
    fold: Callable[[Any, Any, DeviceUpdate], Any]
    step: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Method:
    """A federated method: server half and client half. One per file of `fedquilt.methods`.

    S is a frozen dataclass of arrays, scalars, strings, tuples and mappings with annotated types
    (so that `fedquilt.arrays.tensors.pack_state` can store it); A, a round's accumulator, is any value.
    The server half (init, send, fold, step, done, result) is numpy only; the client half
    (work, check) runs in the device's task process and gets a Task and a Site, nothing else.
    """

    paper: str
    params: type  # frozen dataclass: hyper-parameters with meaning, range, the paper's symbol
    state: type  # S
    engines: Sequence[str]  # which engines can run the client half, preferred first
    init: Callable[[Bundle, Any, int], Any]  # (bundle, params, seed) -> S
    send: Callable[[Any, DeviceView], TaskSpec | None]  # returns None without a task for the device
    work: Callable[[Task, ClientContext], ClientResult]
    check: Callable[[Task, ClientContext], EvaluationSums] | None  # evaluation on the held-out examples
    fold: Callable[[Any, Any, DeviceUpdate], Any]  # (S, A | None, contribution) -> A, in place; UpdateError refuses it
    step: Callable[[Any, Any], Any]  # (S, A | None) -> S; closes the round; neither A is used by anybody afterwards
    result: Callable[[Any], Artefact]
    done: Callable[[Any], bool] = lambda state: False  # most methods end by the job's rounds
    explain: Callable[[Any], Sequence[str]] = lambda state: ()  # sentences on the last step, for the log
    least: Callable[[Any], int] = lambda params: 1  # (params) -> fewest updates of which a round can be made
    settle: EvaluationRound | None = None  # round before each evaluation, if the state needs one
    exact: bool = False  # updates may not be rounded: no lossy codec
    tasks: Sequence[str] = ("classes", "regression", "labels")  # predictions supported (`fedquilt.metrics`)
    anew: bool = False  # whether a device may restart lost private state instead of declining
    refused: Mapping[str, str] = field(default_factory=dict)  # further codecs it refuses -> a sentence why
    uneven: bool = False  # devices of a round may train for unequal numbers of `epochs`, one of its params
    personal: Callable[[Task, ClientContext], Tensors] | None = None
    """A device's own network, all its tensors, as `check` evaluates it; None: what a device runs is the `result`.

    The task is one for a device that has not taken part; the site has the private state, and no examples. Raises
    ModelError where a device has to take part before it has a network.
    """
    keeps: str = ""  # data of each update that a round holds besides its sums, in words, or empty
    frozen: str = ""  # initial weights that are never trained, in words: `prepare` warns if these are random
