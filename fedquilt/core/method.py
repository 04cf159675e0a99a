"""Interface of a federated method: both halves, and the values they take and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

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
class ClassPrior:
    """Class frequencies of a device, and those of the examples that a model was trained on."""

    labels: np.ndarray  # (n,) of the device's training examples
    shares: Sequence[float]  # of each class among the model's examples; (): equal


@dataclass(frozen=True)
class Examples:
    """Labelled examples: inputs `x` and targets `y`.

    `x` is (n, ...) as stored: uint8 (n, h, w) or (n, h, w, c), float32 (n, features) or (n, steps, channels),
    int32 (n, tokens). `y` is by task: classes (n,) int64, regression (n, k) float32, labels (n, k) uint8 of 0 and 1.
    """

    x: np.ndarray
    y: np.ndarray
    prior: ClassPrior | None = None  # with which an evaluation counts correct predictions too

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
    """Update of a device with its tensors: the argument of `Aggregation.fold`.

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


@dataclass(frozen=True)
class Aggregation:
    """Aggregation of a round's updates. S is a method state, A an accumulator.

    An accumulator belongs to one round, and `fold` may change it in place after all checks of the update.
    """

    fold: Callable[[Any, Any, DeviceUpdate], Any]  # (S, A | None, update) -> A; raises UpdateError to reject
    accumulator: Callable[[Any], type | None] = lambda state: None
    """Function of S that returns the type A if accumulators consist of exact sums and device counts, else None.

    Updates are then folded in any order, and `fedquilt.arrays.exact_sums.merge_accumulators` merges accumulators of
    different devices.
    """
    schema: Callable[[Any], UpdateSchema | None] = lambda state: None  # of valid updates; None: not known in advance
    check_update: Callable[[Any, DeviceUpdate], None] | None = None
    """Function (S, update) that raises UpdateError if `fold` would. Without it, a fold on its own is the check."""
    check_sums: Callable[[Any, Any, float], None] | None = None
    """Function (S, A, weight) that raises UpdateError unless A can be the accumulator of a site's devices.

    Without it, sites forward the updates of their devices.
    """

    def require_valid_update(self, state: Any, update: DeviceUpdate) -> None:
        """Raise UpdateError if an update is invalid in this state, without keeping a sum."""
        if self.check_update is None:
            self.fold(state, None, update)
        else:
            self.check_update(state, update)


@dataclass(frozen=True)
class Traits:
    """Properties of a method that the rest of fedquilt heeds."""

    exact_updates: bool = False  # updates may not be rounded: no lossy codec
    refused_codecs: Mapping[str, str] = field(default_factory=dict)  # further codec -> a sentence why not
    unequal_epochs: bool = False  # devices of a round may train for unequal numbers of `epochs`, one of the params
    replaces_private_state: bool = False  # a device whose private state is lost starts without; else it declines
    prediction_tasks: Sequence[str] = ("classes", "regression", "labels")  # `fedquilt.metrics`
    per_device_data: str = ""  # what a round keeps of each device's update beside its sums; "": nothing
    equal_classes: bool = False  # models treat all classes as equally frequent, whatever the devices' examples
    frozen_weights: str = ""  # first weights that are never trained, in words; `prepare` warns if they are random
    training_passes: int | str = 1  # forward and backward, over each example in an epoch; or the param that says so
    forward_passes: int = 0  # over each example in an epoch, besides those
    model_copies: int | str = 0  # in memory, besides those of plain SGD; or the param above 0 with which there is one


@dataclass(frozen=True)
class Artefact:
    """Result of a finished job: metadata and tensors, as written by `fedquilt model export`."""

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
    aggregation: Aggregation
    step: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Method:
    """A federated method: server half and client half. One per file of `fedquilt.methods`.

    S is a frozen dataclass of arrays, scalars, strings, tuples and mappings with annotated types
    (so that `fedquilt.arrays.tensors.pack_state` can store it); A, a round's accumulator, is any value.
    The server half (init, send, aggregation, step, done, result) is numpy only; the client half
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
    aggregation: Aggregation  # of a round's updates in an accumulator A
    step: Callable[[Any, Any], Any]  # (S, A | None) -> S; closes the round; neither A is used by anybody afterwards
    result: Callable[[Any], Artefact]
    candidate: Callable[[Any, int], Artefact] | None = None
    """Another network that the job could have resulted in, by its number from 1; None: there are no others.

    Raises JobError where the number is unknown.
    """
    traits: Traits = Traits()
    common_task: bool = False  # `send` returns the same task for all devices of a round, and is called once
    done: Callable[[Any], bool] = lambda state: False  # most methods end by the job's rounds
    explain: Callable[[Any], Sequence[str]] = lambda state: ()  # sentences on the last step, for the log
    minimum_updates: Callable[[Any], int] = lambda params: 1  # (params) -> fewest updates that a round may close with
    settle: EvaluationRound | None = None  # round before each evaluation, if the state needs one
    personal: Callable[[Task, ClientContext], Tensors] | None = None
    """A device's own network, all its tensors, as `check` evaluates it; None: what a device runs is the `result`.

    The task is one for a device that has not taken part; the site has the private state, and no examples. Raises
    ModelError where a device has to take part before it has a network.
    """
