"""Interface of a federated method: both halves, the values they take and return, and the engines they use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

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
    """Task for one device in one round. Each bundle is a mapping of tensors or a reference to a stored blob."""

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


# -- engines --------------------------------------------------------------------------------------


class Engine(Protocol):
    """Base interface of all engines."""

    name: str

    def close(self) -> None:
        """Free all resources: graphs, device memory and threads."""
        ...


Choice: TypeAlias = str | Mapping[str, Any]  # `fedquilt.formats.training_choices`


@dataclass(frozen=True)
class Fit:
    """Settings of mini-batch training."""

    epochs: int = 1
    batch: int = 32
    lr: float = 0.05
    optimizer: Choice = field(default="sgd", hash=False)  # reset at every task
    momentum: float = 0.0  # of "sgd", and of optimizers of torch that have it
    nesterov: bool = False  # of "sgd" with momentum
    weight_decay: float = 0.0  # added to the gradient: times the weight
    clip: float = 0.0  # largest gradient norm; 0: no clipping
    mixed: bool = False  # 16-bit arithmetic where a GPU has it; weights stay 32-bit
    loss: Choice = field(default="", hash=False)  # the empty text is the loss of the network's task
    schedule: Choice = field(default="constant", hash=False)  # of steps; `lr` is that of the round
    round: int = 0  # of the job, for the schedule
    augment: Sequence[Choice] = field(default=(), hash=False)
    accumulate: int = 1  # parts of a mini-batch whose gradients are added up
    ema: float = 0.0  # share kept by the moving average of the weights, which is returned; 0: the last weights


@dataclass(frozen=True)
class Step:
    """Optimiser step on a mini-batch: learning rate of each tensor and an additional loss term."""

    rate: Callable[[str], float] = lambda name: 1.0  # factor on `Fit.lr` by tensor; 0: the tensor is frozen
    penalty: Callable[[Any, Any, Any, Mapping[str, Any]], Any] | None = None
    """(module, x, scores, anchors) -> term added to the mean loss of these examples, a scalar of the engine."""
    begin: Callable[[Any], None] | None = None  # (module): called once before the step, for all its micro-batches
    exits: Callable[[], Sequence[Any]] | None = None  # scores of all exits on these examples: their losses are summed


@dataclass(frozen=True)
class Hooks:
    """Changes of a method to training. The defaults change nothing.

    An engine rejects hooks that it does not support, by name. The numpy engine has no module, so it supports neither
    `prepare` nor `penalty`, `begin` or `exits`, and exactly one step.
    """

    correct: Callable[[Any, Any, Mapping[str, Any]], Any] | None = None
    """(gradient, value, at) -> the gradient to use for one tensor, in the engine's own array type, before
    clipping. `at[anchor]` is that anchor's tensor of the same name. Plain arithmetic works in every engine."""
    anchors: Mapping[str, Tensors] = field(default_factory=dict)
    """Further tensors, each under the names of what is trained. "start" is always there: the tensors received."""
    prepare: Callable[[Any], Any] | None = None
    """(module) -> the module to train: with gates, masks, adapters or a forward pass of its own. `start` has to hold
    the tensors of this module, and they are returned."""
    inputs: Callable[[Any], Any] | None = None  # stored examples -> network inputs; None: by the network's table
    steps: tuple[Step, ...] = (Step(),)  # taken in order on every mini-batch; the last one's loss is reported


class Trainer(Engine, Protocol):
    """Engine that trains a network, given by a table such as `{"name": "mlp"}`."""

    def train(
        self,
        network: Mapping[str, Any],
        start: Tensors,
        examples: Examples,
        fit: Fit,
        rng: np.random.Generator,
        *,
        hooks: Hooks = Hooks(),
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> tuple[Tensors, dict[str, float]]:
        """Train a network and return the trained tensors and metrics.

        Metrics are "loss", the mean of the last epoch, and "steps", the number of mini-batches. `progress` is called
        after every mini-batch with the completed share, 0 to 1. An exception from `progress` ends the training.

        Raises:
            UpdateError: If the loss is no longer finite or has exploded.
            ModelError: If `start` or an anchor does not fit the network, or the engine does not support a hook.
        """
        ...

    def evaluate(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, hooks: Hooks = Hooks()
    ) -> EvaluationSums:
        """Evaluate a network and return the sums over the examples.

        Only the hooks `prepare` and `inputs` apply.
        """
        ...

    def fisher(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, each: int = 1, hooks: Hooks = Hooks()
    ) -> Tensors:
        """Return the diagonal of the empirical Fisher information of each parameter.

        This is the mean squared gradient of log p(y | x), computed in evaluation mode. Gradients of `each` examples are
        averaged before squaring. Only the hooks `prepare` and `inputs` apply.

        Raises:
            DataError: If there are no examples.
            ModelError: If the tensors do not fit the network, or the engine does not support a hook.
        """
        ...


class Runner(Engine, Protocol):
    """Engine that runs ONNX graphs and keeps only one loaded unless its memory budget allows more."""

    @property
    def room_bytes(self) -> int:
        """Memory budget in bytes beyond the memory of the bare process."""
        ...

    def batch(self, graph: Path, around_bytes: int = 0, example_bytes: int = 0) -> int:
        """Return the number of examples to run at once.

        Args:
            graph: The path of the graph.
            around_bytes: The memory that the caller uses during the run.
            example_bytes: The memory that the caller uses for each example.
        """
        ...

    def make_room(self, size: int) -> None:
        """Free cached resources until `size` bytes are available, as far as possible."""
        ...

    def run(self, graph: Path, x: np.ndarray) -> np.ndarray:
        """Run a graph with one float32 input and return its only output.

        Examples are run in micro-batches along axis 0.
        """
        ...

    def evaluate_scores(
        self, batches: Iterable[tuple[np.ndarray, np.ndarray]], prior: ClassPrior | None = None
    ) -> EvaluationSums:
        """Evaluate (scores, labels) batches that the caller has computed: arrays (n, classes) and (n,)."""
        ...


# -- seeds ----------------------------------------------------------------------------------------


def derive_seed(*keys: object) -> int:
    """Return a 53-bit seed from any keys, equal on every machine and Python version."""
    return seed_deriver(*keys[:-1])(keys[-1])


def seed_deriver(*keys: object) -> Callable[[object], int]:
    """Return a function of one more key that returns `derive_seed(*keys, key)`.

    The common keys are hashed only once.
    """
    copied = hashlib.sha256("".join([f"{key}\x1f" for key in keys]).encode()).copy

    def seed(last: object) -> int:
        whole = copied()
        whole.update(str(last).encode())
        return int.from_bytes(whole.digest()[:8], "big") >> 11

    return seed
