"""Interface of a federated method: its server and client halves, their values, and engines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from fedquilt.core.messages import BlobRef, EvaluationSums, Profile, Task, WorkEstimate

if TYPE_CHECKING:
    import numpy as np

    Tensors: TypeAlias = Mapping[str, np.ndarray]  # "layer1.0.conv1.weight" -> array
else:  # the agent daemon does not import numpy, which takes 17 MB
    Tensors = Mapping


@dataclass(frozen=True)
class DeviceView:
    """Latest profile of a device and the rounds in which the device took part."""

    device: str
    profile: Profile | None
    rounds: Sequence[int] = ()  # rounds of this job with its updates, oldest first


@dataclass(frozen=True)
class TaskSpec:
    """Task for a device in a round. Each bundle is a mapping of tensors or a reference to a stored blob."""

    params: Mapping[str, Any]
    bundles: Mapping[str, Tensors | BlobRef]
    work: WorkEstimate = WorkEstimate()
    held_out: bool = False  # whether `work` counts held-out examples instead of training examples
    check: WorkEstimate | None = None
    """Work of an evaluation on as many examples as the device trains on, or None if not predicted."""


@dataclass(frozen=True)
class Bundle:
    """Output of `fedquilt prepare` for a job: metadata, and files by name."""

    meta: Mapping[str, Any]
    files: Mapping[str, BlobRef]
    load: Callable[[str], Tensors]  # file name -> tensors of a safetensors file


@dataclass(frozen=True)
class ClassPrior:
    """Class frequencies of a device, and those of the examples that a model was trained on."""

    labels: np.ndarray  # (n,) labels of the device's training examples
    shares: Sequence[float]  # of each class in the model's training examples, () if equal


@dataclass(frozen=True)
class Examples:
    """Labelled examples: inputs `x` and targets `y`.

    `x` has shape (n, ...) as stored: uint8 (n, h, w) or (n, h, w, c), float32 (n, features) or (n, steps, channels),
    int32 (n, tokens). `y` depends on the prediction: classes (n,) int64, regression (n, k) float32, labels (n, k)
    uint8 of 0 and 1.
    """

    x: np.ndarray
    y: np.ndarray
    prior: ClassPrior | None = None  # enables `EvaluationSums.correct_with_priors`

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ClientContext:
    """Inputs of a client half: examples, tensors, engine and random generator."""

    device: str
    budget_bytes: int
    engine: Any  # one of fedquilt.edge_agent.engines
    rng: np.random.Generator  # keyed by (seed, job, round, device)
    train: Examples  # training examples of the device
    held_out: Examples  # held-out examples of the device, for evaluation only
    private_state: Tensors  # private state of the job on the device, never sent
    load: Callable[[str], Tensors]  # bundle name -> tensors, read on demand
    path: Callable[[str], Path]  # bundle name -> file on disk, such as an ONNX graph
    cache_folder: Path | str  # folder that `cache` creates at its first use
    progress: Callable[[float], None] = lambda fraction: None  # 0..1; raises when the task is cancelled
    lost_state_reason: str = ""  # why stored private state is missing, "" if it is not missing

    @property
    def cache(self) -> Path:
        """Folder for files of this job on the device, created on demand and never sent.

        The files may be gone at the next task.

        Raises:
            OSError: If the folder cannot be created.
        """
        folder = Path(self.cache_folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass(frozen=True)
class ClientResult:
    """Return value of a client half: the bundles to send and the private state that stays."""

    bundles: Mapping[str, Tensors]
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    private_state: Tensors = field(default_factory=dict)


NEW_DEVICE: Final = "new"
"""Metric that is 1 in a device's first aggregated update, else 0. The coordinator corrects false claims."""


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
    """Return a mapping of tensors in which shapes and dtypes can be read without loading files."""
    shapes: Mapping[str, Any] = getattr(tensors, "shapes", tensors)
    return shapes


@dataclass(frozen=True)
class UpdateSchema:
    """Names, shapes and dtypes of the tensors that an update may contain.

    The manifest of an update is checked against the schema before any blob is fetched.
    """

    bundles: Mapping[str, Mapping[str, Any]]  # by bundle and tensor: an array, or an object with shape and dtype
    exact: bool = True  # False also allows fewer bundles, fewer tensors and smaller shapes


@dataclass(frozen=True)
class StateChange:
    """Change of a state S by an update, for buffered rounds and for differential privacy ([privacy]).

    Differential privacy needs `norm` and `add_noise`: the coordinator scales a change to its largest norm.
    """

    scale: Callable[[Any, Any, DeviceUpdate, float], DeviceUpdate]
    """Function (S, earlier S, update, factor) that returns an update of the earlier state as one of the present state.

    The update then makes `factor` of its change, at most 1. Both states are the same object in synchronous rounds.
    """
    norm: Callable[[Any, DeviceUpdate], float] | None = None
    """Function (S, update) that returns the Euclidean norm of the change in all tensors of a valid update."""
    add_noise: Callable[[Any, Callable[[str, tuple[int, ...]], np.ndarray]], Any] | None = None
    """Function (A, draw) that returns the accumulator with noise added to each sum.

    `draw` returns float64 noise by name and shape of a sum.
    """
    unprotected_names: Callable[[Any], Sequence[str]] = lambda state: ()
    """Function (S) that returns the names of tensors of an update that noise would make useless.

    They are counters, and statistics that must not be negative. [privacy] refuses networks with such tensors.
    """

    @property
    def supports_noise(self) -> bool:
        return self.norm is not None and self.add_noise is not None


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
    schema: Callable[[Any], UpdateSchema | None] = lambda state: None  # of valid updates, None if unknown in advance
    check_update: Callable[[Any, DeviceUpdate], None] | None = None
    """Function (S, update) that raises UpdateError if `fold` would. Default: `fold` without an accumulator."""
    check_sums: Callable[[Any, Any, float], None] | None = None
    """Function (S, A, weight) that raises UpdateError unless A can be the accumulator of a site's devices.

    Without it, sites forward the updates of their devices.
    """
    change: StateChange | None = None
    """Change by an update. None if changes cannot be scaled: `[cohort] mode = "buffered"` and [privacy] are refused."""

    def require_valid_update(self, state: Any, update: DeviceUpdate) -> None:
        """Raise UpdateError if an update is invalid in this state."""
        if self.check_update is None:
            self.fold(state, None, update)
        else:
            self.check_update(state, update)


@dataclass(frozen=True)
class Traits:
    """Properties of a method that control its jobs."""

    sent_data: str = "the model"  # data that a device sends in a round, in words
    private_data: str = ""  # data that stays on a device from task to task, in words, or "" if it keeps none
    exact_updates: bool = False  # updates must not be rounded by a lossy codec
    refused_codecs: Mapping[str, str] = field(default_factory=dict)  # other unsupported codecs, each with a reason
    unequal_epochs: bool = False  # devices of a round may train for unequal numbers of `epochs`
    replaces_private_state: bool = False  # a device that lost its private state starts without it, else declines
    prediction_tasks: Sequence[str] = ("classes", "regression", "labels")  # `fedquilt.metrics`
    tier_networks: bool = False  # devices of a memory tier may have a network of their own, `[model.tier]`
    per_device_data: str = ""  # data of each update that a round stores besides sums, in words
    equal_classes: bool = False  # models assume equally frequent classes
    frozen_weights: str = ""  # initial weights that are never trained, in words; `prepare` warns if they are random
    training_passes: int | str = 1  # forward and backward passes per example and epoch, or the name of a param
    forward_passes: int = 0  # additional forward passes per example and epoch
    model_copies: int | str = 0  # in memory beyond plain SGD, or the name of a param that adds a copy if above 0


@dataclass(frozen=True)
class Artefact:
    """Result of a finished job: metadata and tensors, as written by `fedquilt model export`."""

    kind: str  # "weights" | "stitched" | "dualcopy"
    meta: Mapping[str, Any]
    tensors: Tensors

    @property
    def untrained_tensors(self) -> Sequence[str]:
        """Names of the network's tensors with initial values, because the trained values stay on devices.

        `meta["untrained"]` lists the names, by default those in `meta["private"]`.
        """
        return self.meta.get("untrained", self.meta.get("private", ()))


@dataclass(frozen=True)
class EvaluationRound:
    """Server half of an evaluation round, which collects data for the evaluation of a state.

    The tasks of an evaluation round are run by `Method.work`, which recognises them by their parameters. An evaluation
    round precedes each evaluation and the end of a job, does not count as a round of the job, and selects every
    available device.
    """

    is_needed: Callable[[Any], bool]  # (S) -> whether the job needs such rounds; called once, with the first state
    send: Callable[[Any, DeviceView], TaskSpec | None]  # as in `Method`
    aggregation: Aggregation
    step: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Method:
    """Federated method with a server half and a client half.

    S is a frozen dataclass of arrays, scalars, strings, tuples and mappings with annotated types, which
    `fedquilt.arrays.tensors.pack_state` can store. A, the accumulator of a round, is any value.
    The server half (init, send, aggregation, step, is_done, result) uses only numpy. The client half
    (work, check) runs in the device's task process and gets only a Task and a ClientContext.
    """

    paper: str
    params: type  # frozen dataclass: hyper-parameters with meaning, range, the paper's symbol
    state: type  # S
    engines: Sequence[str]  # engines that can run the client half, in order of preference
    init: Callable[[Bundle, Any, int], Any]  # (bundle, params, seed) -> S
    send: Callable[[Any, DeviceView], TaskSpec | None]  # returns None without a task for the device
    work: Callable[[Task, ClientContext], ClientResult]
    check: Callable[[Task, ClientContext], EvaluationSums] | None  # evaluation on the held-out examples
    aggregation: Aggregation  # of a round's updates
    step: Callable[[Any, Any], Any]  # (S, A | None) -> S: ends the round and may change A in place
    result: Callable[[Any], Artefact]
    candidate: Callable[[Any, int], Artefact] | None = None
    """Function (S, number) that returns an alternative result by its number from 1, or None without alternatives.

    It raises JobError for an unknown number.
    """
    traits: Traits = Traits()
    common_task: bool = False  # `send` returns the same task for all devices of a round, and is called once
    is_done: Callable[[Any], bool] = lambda state: False  # ends the job before its last round
    explain: Callable[[Any], Sequence[str]] = lambda state: ()  # sentences on the latest step, for the log
    minimum_updates: Callable[[Any], int] = lambda params: 1  # (params) -> minimum number of updates of a round
    evaluation_round: EvaluationRound | None = None  # round before each evaluation, if the state needs one
    personal_model: Callable[[Task, ClientContext], Tensors] | None = None
    """Function that returns all tensors of a device's own network, or None if devices use the `result`.

    The arguments are the task of a newcomer and a context with private state and without examples. The function raises
    ModelError if a newcomer has no network.
    """


# -- engines --------------------------------------------------------------------------------------


class Engine(Protocol):
    """Base interface of the engines that train networks or run graphs."""

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
    momentum: float = 0.0  # for "sgd" and optimizers of torch with momentum
    nesterov: bool = False  # for "sgd" with momentum
    weight_decay: float = 0.0  # factor of the weight that is added to the gradient
    clip: float = 0.0  # largest gradient norm, 0 for no clipping
    mixed: bool = False  # 16-bit arithmetic on GPUs that support it, with 32-bit weights
    loss: Choice = field(default="", hash=False)  # "" selects the loss of the network's task
    schedule: Choice = field(default="constant", hash=False)  # of the steps; `lr` is the rate of the round
    round: int = 0  # number of the job's round, for the schedule
    augment: Sequence[Choice] = field(default=(), hash=False)
    accumulate: int = 1  # number of parts of a mini-batch whose gradients are added
    ema: float = 0.0  # decay of the moving average of the weights that is returned; 0 returns the last weights


class ForwardPass(NamedTuple):
    """Forward pass of a mini-batch, or of a part of one, in the engine's types."""

    module: Any
    x: Any  # inputs of the network (n, ...)
    y: Any  # targets (n, ...)
    scores: Any  # outputs of the network (n, outputs)
    anchors: Mapping[str, Any]  # tensors by anchor, as in `Hooks`


@dataclass(frozen=True)
class Step:
    """Optimiser step on a mini-batch: learning rate of each tensor and an additional loss term.

    Attributes:
        rate: (tensor name) -> factor of `Fit.lr`, 0 for a frozen tensor.
        penalty: (ForwardPass) -> scalar of the engine that is added to the mean loss of the examples.
        before_step: (module) -> None, called before the first part of a mini-batch.
        exits: () -> scores of all exits, whose losses are summed.
    """

    rate: Callable[[str], float] = lambda name: 1.0
    penalty: Callable[[ForwardPass], Any] | None = None
    before_step: Callable[[Any], None] | None = None
    exits: Callable[[], Sequence[Any]] | None = None


@dataclass(frozen=True)
class Hooks:
    """Changes of a method to training. The defaults change nothing.

    An engine rejects a hook that it does not support, and names it. The numpy engine has no module: it supports exactly
    one step, and none of `prepare`, `penalty`, `before_step` and `exits`.

    Attributes:
        correct_gradient: (gradient, value, anchors) -> corrected gradient of one tensor, in the engine's array type,
            before clipping. `anchors[anchor]` is the tensor of the same name in that anchor. Plain arithmetic works in
            every engine.
        anchors: Additional tensors by anchor, with the names of the trained tensors. "start" always has the tensors
            from which training starts.
        prepare: (module) -> module to train, such as one with masks or adapters. The argument is a new module that may
            be changed in place. `start` must contain the tensors of the returned module, which training returns.
        inputs: (stored examples) -> network inputs. None selects the network's table.
        steps: Steps that run in order on every mini-batch. The loss of the last step is reported.
    """

    correct_gradient: Callable[[Any, Any, Mapping[str, Any]], Any] | None = None
    anchors: Mapping[str, Tensors] = field(default_factory=dict)
    prepare: Callable[[Any], Any] | None = None
    inputs: Callable[[Any], Any] | None = None
    steps: tuple[Step, ...] = (Step(),)


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
        self,
        network: Mapping[str, Any],
        model: Tensors,
        examples: Examples,
        *,
        examples_per_gradient: int = 1,
        hooks: Hooks = Hooks(),
    ) -> Tensors:
        """Return the diagonal of the empirical Fisher information of each parameter.

        This is the mean squared gradient of log p(y | x), computed in evaluation mode. Gradients of
        `examples_per_gradient` examples are averaged before squaring. Only the hooks `prepare` and `inputs` apply.

        Raises:
            DataError: If there are no examples.
            ModelError: If the tensors do not fit the network, or the engine does not support a hook.
        """
        ...


class Runner(Engine, Protocol):
    """Engine that runs ONNX graphs. Several graphs stay loaded only if the memory budget allows."""

    @property
    def available_bytes(self) -> int:
        """Bytes of the memory budget that remain for graphs and data, besides the process itself."""
        ...

    def batch(self, graph: Path, caller_bytes: int = 0, caller_bytes_per_example: int = 0) -> int:
        """Return the number of examples to run at once.

        Args:
            graph: The path of the graph.
            caller_bytes: The memory that the caller uses during the run.
            caller_bytes_per_example: The memory that the caller uses for each example.
        """
        ...

    def make_room(self, size_bytes: int) -> None:
        """Free cached graphs until `size_bytes` of the memory budget are available, or no graph is cached."""
        ...

    def run(self, graph: Path, x: np.ndarray) -> np.ndarray:
        """Run a graph with one float32 input and return its only output.

        Examples are run in micro-batches along axis 0.
        """
        ...

    def evaluate_scores(
        self, batches: Iterable[tuple[np.ndarray, np.ndarray]], prior: ClassPrior | None = None
    ) -> EvaluationSums:
        """Evaluate scores that the caller has computed: batches of scores (n, classes) and labels (n,).

        With `prior`, predictions corrected by class priors are counted too.
        """
        ...


# -- seeds ----------------------------------------------------------------------------------------


def derive_seed(*keys: object) -> int:
    """Return a 53-bit seed from any keys, identical on every machine and Python version."""
    return seed_deriver(*keys[:-1])(keys[-1])


def seed_deriver(*keys: object) -> Callable[[object], int]:
    """Return a function that maps a further key to `derive_seed(*keys, key)`, and hashes `keys` only once."""
    copy_common_hash = hashlib.sha256("".join([f"{key}\x1f" for key in keys]).encode()).copy

    def seed(key: object) -> int:
        digest = copy_common_hash()
        digest.update(str(key).encode())
        return int.from_bytes(digest.digest()[:8], "big") >> 11

    return seed
