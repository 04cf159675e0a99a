"""The vocabulary both sides share: types only, no I/O, no arithmetic.

Everything here is a value (frozen), every physical quantity carries its unit in its name
(`_s`, `_j`, `_bytes`, `_hz`, `_w`), and what cannot be measured is ``None``, never 0.
Types that travel are msgspec structs (strictly decoded, see `fedquilt.wire`); types that stay in
one process are dataclasses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    import numpy as np

    Tensors: TypeAlias = Mapping[str, np.ndarray]  # "layer1.0.conv1.weight" -> array
else:  # the agent daemon holds no numpy: 17 MB it never uses
    Tensors = Mapping

# -- errors ---------------------------------------------------------------------------------------


class FedquiltError(Exception):
    """Something a user can mend. `exit_code` is what a command that ends by it returns."""

    exit_code = 1


class JobError(FedquiltError):
    """A job file, a setting or a command line that cannot be carried out as written."""

    exit_code = 2


class DataError(FedquiltError):
    """Examples that are absent, unreadable or of the wrong shape."""

    exit_code = 3


class ModelError(FedquiltError):
    """A network, donor, block or weight file that does not fit what is asked of it."""

    exit_code = 4


class LinkError(FedquiltError):
    """A broker that cannot be reached, refuses, or takes no packets of the size needed."""

    exit_code = 5


class StoreError(FedquiltError):
    """A folder or database that cannot be read or written; a full disk."""

    exit_code = 6


class MemoryBudgetError(FedquiltError):
    """A task that does not fit the memory it may use."""

    exit_code = 7


class ClockError(FedquiltError):
    """Clocks that cannot be set here, or that did not take what they were set to."""

    exit_code = 8


class UpdateError(FedquiltError):
    """An update that may not be folded: not finite, wrong names or shapes, or inconsistent."""


class WireError(FedquiltError):
    """Bytes from the network that are not a message of this protocol version."""


# -- what travels ---------------------------------------------------------------------------------

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
"""A job, fleet or device id: safe in a topic, a file name and a log line."""

Label = Annotated[str, Meta(max_length=200)]
Sentence = Annotated[str, Meta(max_length=1000)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Amount = Annotated[float, Meta(ge=0.0, le=1e24)]
Metrics = Annotated[dict[Label, float], Meta(max_length=1000)]


class Wired(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that is encoded: immutable, by keyword, unknown fields refused."""


class BlobRef(Wired, frozen=True):
    """A blob by content: the sha256 of all its bytes, and how many there are."""

    sha256: Digest
    size: Count


class Work(Wired, frozen=True):
    """What a task costs, as far as its sender knows: deadlines and budgets are predicted from it."""

    flops: Amount = 0.0  # one multiply-add is 2
    flops_per_example: Amount = 0.0  # besides, for each of the device's own examples; how many only it knows
    read_bytes: Amount = 0.0  # weights and activations read from memory
    examples: Count = 0
    peak_bytes: Count = 0  # the least it can be done with, above an engine at work; 0: not predicted

    def on(self, examples: int) -> Work:
        """The same work for a device with so many examples of its own: `flops` is all of it."""
        flops = self.flops + self.flops_per_example * examples
        return msgspec.structs.replace(self, flops=flops, flops_per_example=0.0)


Action = Literal["check", "work"]
CODECS: Final = ("raw", "fp16", "int8", "topk")  # that this version knows: `fedquilt.compression`


class Encoding(Wired, frozen=True):
    """How the tensors of an update go up: a job's [wire] table. `fedquilt.compression` says what each codec does."""

    codec: Name = "raw"  # one of CODECS; a device that does not know it is not asked
    keep: Annotated[float, Meta(gt=0, le=1)] = 0.05  # of "topk": share of a tensor's entries that is told


class Task(Wired, frozen=True):
    """Coordinator to one device: self-contained. (job, round, device) names it; `attempt` counts re-issues."""

    job: Name
    round: Count
    attempt: Count
    method: Name
    engine: Name  # which engine the method asks for: "onnx", "torch", "numpy"
    actions: Annotated[tuple[Action, ...], Meta(min_length=1, max_length=2)]
    params: Annotated[dict[Label, Any], Meta(max_length=1000)]
    bundles: Annotated[dict[Label, BlobRef], Meta(max_length=2000)]
    work: Work
    seed: Count
    deadline_s: Seconds  # remaining when sent: a board's clock may say 1970
    tier: Label = ""
    wire: Encoding = Encoding()


class Usage(Wired, frozen=True):
    """What a task took. Bytes count blob payloads, not protocol overhead."""

    wall_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    energy_j: Amount | None = None  # gross: all that the board took meanwhile
    idle_j: Amount | None = None  # of it, what the board takes in that time when it does nothing
    energy_error_j: Amount | None = None  # the true figure lies within so much of energy_j
    energy_source: Label | None = None  # "ina3221 VDD_IN, 10 Hz, trapezoids", "rapl", "profile tx2 (assumed)", ...
    point: Label | None = None  # the operating point it was held at; None: the board's own governor
    peak_bytes: Count | None = None  # resident peak of the task's own process
    base_bytes: Count | None = None  # resident of that process before the task: runtime imports
    examples: Count | None = None  # the device's own, held-out ones aside
    down_bytes: Count = 0
    up_bytes: Count = 0


class Update(Wired, frozen=True):
    """Device to coordinator: a manifest of what was computed; the tensors are pulled as blobs."""

    job: Name
    round: Count
    attempt: Count
    device: Name
    weight: Amount  # what the method weighs by, mostly the number of examples
    bundles: Annotated[dict[Label, BlobRef], Meta(max_length=2000)]
    metrics: Metrics
    usage: Usage
    bases: Annotated[dict[Label, Digest], Meta(max_length=2000)] = {}  # with a codec: what a bundle has moved from


class OperatingPoint(Wired, frozen=True):
    """One setting of the clocks a board can be held at, and what it was seen to do there."""

    name: Label
    cpu_hz: Amount | None = None
    gpu_hz: Amount | None = None
    emc_hz: Amount | None = None
    flops_per_s: Amount | None = None  # sustained on our own work, not a data sheet's peak
    bytes_per_s: Amount | None = None  # memory traffic, likewise
    busy_w: Amount | None = None  # of the whole board, while it works


class Profile(Wired, frozen=True):
    """What a device says of itself. Every number is the device's own unless `provenance` says else."""

    device: Name
    board: Label
    memory_bytes: Count
    budget_bytes: Count  # the most one task's process may hold resident
    engines: Annotated[tuple[Name, ...], Meta(max_length=20)]
    versions: Annotated[dict[Label, Label], Meta(max_length=50)]
    points: Annotated[tuple[OperatingPoint, ...], Meta(max_length=200)] = ()
    idle_w: Amount | None = None
    provenance: Label = "unknown"  # sysfs | table | measured | assumed | unknown
    codecs: Annotated[tuple[Name, ...], Meta(max_length=20)] = ("raw",)


# -- what stays in one process --------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceView:
    """A device as the coordinator last saw it: all that `Method.send` may look at."""

    device: str
    profile: Profile | None
    rounds: tuple[int, ...] = ()  # rounds of this job it has contributed to, oldest first


@dataclass(frozen=True)
class Order:
    """What one device is asked in one round. A bundle is tensors, or the name of a blob already stored."""

    params: Mapping[str, Any]
    bundles: Mapping[str, Tensors | BlobRef]
    work: Work = Work()


@dataclass(frozen=True)
class Bundle:
    """What `fedquilt prepare` made for a job: facts, and blobs by name."""

    meta: Mapping[str, Any]
    files: Mapping[str, BlobRef]
    load: Callable[[str], Tensors]  # the tensors of one safetensors file in it


@dataclass(frozen=True)
class Examples:
    """Labelled examples. `x` is (n, ...) as stored, mostly uint8 (n, h, w) or (n, h, w, c); `y` is (n,) int."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Site:
    """All that a client half may touch."""

    device: str
    budget_bytes: int
    engine: Any  # one of fedquilt.edge_agent.engines
    rng: np.random.Generator  # keyed by (seed, job, round, device)
    train: Examples  # the board's own examples
    held: Examples  # its held-out share: evaluation only
    local: Tensors  # private per-job state: kept on the board, never sent
    load: Callable[[str], Tensors]  # bundle name -> tensors, read when asked for
    path: Callable[[str], Path]  # bundle name -> file on disk (an ONNX graph, say)
    cache: Path  # a folder of this job's: what a task leaves there may be gone at the next; never sent
    progress: Callable[[float], None] = lambda fraction: None  # 0..1; raises when the task is cancelled


@dataclass(frozen=True)
class Answer:
    """What a client half returns: what is sent, and the private state that stays."""

    bundles: Mapping[str, Tensors]
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    local: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Contribution:
    """An update with its tensors at hand: what `Method.fold` gets."""

    device: str
    round: int
    weight: float
    metrics: Mapping[str, float]
    bundles: Mapping[str, Tensors]


@dataclass(frozen=True)
class Artefact:
    """What a finished job yields: facts (JSON) and tensors; `fedquilt export` turns it into a file."""

    kind: str  # "weights" | "stitched" | "dualcopy"
    meta: Mapping[str, Any]
    tensors: Tensors


@dataclass(frozen=True)
class Settle:
    """The server half of a round that trains nobody, and gathers what a state needs before it is evaluated.

    Its tasks go to `Method.work`, which tells them by their params. Such a round comes before each evaluation, before
    a job ends, and does not count among the job's rounds; all devices that are there are asked.
    """

    wanted: Callable[[Any], bool]  # (S) -> whether states of this job need it: asked once, of the first
    send: Callable[[Any, DeviceView], Order | None]  # as of `Method`
    fold: Callable[[Any, Any, Contribution], Any]
    step: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Method:
    """One federated method, both halves, cut at the wire. One per file of `fedquilt.methods`.

    S is a frozen dataclass of arrays, scalars, strings, tuples and mappings with annotated types
    (so that `fedquilt.tensors.pack` can store it); A, a round's accumulator, is any value.
    The server half (init, send, fold, step, done, result) is numpy only; the client half
    (work, check) runs in the device's task process and gets a Task and a Site, nothing else.
    """

    paper: str
    params: type  # frozen dataclass: hyper-parameters with meaning, range, the paper's symbol
    state: type  # S
    engines: Sequence[str]  # which engines can run the client half, preferred first
    init: Callable[[Bundle, Any, int], Any]  # (bundle, params, seed) -> S
    send: Callable[[Any, DeviceView], Order | None]  # None: nothing for this device now
    work: Callable[[Task, Site], Answer]
    check: Callable[[Task, Site], Mapping[str, float]] | None  # must report "examples" among its metrics
    fold: Callable[[Any, Any, Contribution], Any]  # (S, A | None, contribution) -> A; UpdateError refuses it
    step: Callable[[Any, Any], Any]  # (S, A | None) -> S; closes the round
    result: Callable[[Any], Artefact]
    done: Callable[[Any], bool] = lambda state: False  # most methods end by the job's rounds
    story: Callable[[Any], Sequence[str]] = lambda state: ()  # the last step in plain sentences
    settle: Settle | None = None  # None: a state can be evaluated as it is
    exact: bool = False  # what devices send may not be rounded: no lossy codec
    refused: Mapping[str, str] = field(default_factory=dict)  # further codecs it does not work with -> why, a sentence


class Engine(Protocol):
    """What every engine says of itself; what it can do is in `Trainer` and `Runner`."""

    name: str

    def close(self) -> None: ...


@dataclass(frozen=True)
class Fit:
    """How a trainer goes through its examples, in mini-batches."""

    epochs: int = 1
    batch: int = 32
    lr: float = 0.05
    optimizer: Literal["sgd", "adam"] = "sgd"  # Adam with betas 0.9 and 0.999, begun anew with every task
    momentum: float = 0.0  # of "sgd"
    nesterov: bool = False  # of "sgd" with momentum
    weight_decay: float = 0.0  # added to the gradient: times the weight
    clip: float = 0.0  # largest gradient norm; 0: no clipping
    mixed: bool = False  # 16-bit arithmetic where a GPU has it; weights stay 32-bit


@dataclass(frozen=True)
class Turn:
    """One step on a mini-batch: which tensors it moves and what it adds to the loss."""

    rate: Callable[[str], float] = lambda name: 1.0  # of a tensor, times `Fit.lr`; 0: it is held still
    penalty: Callable[[Any, Any, Any, Mapping[str, Any]], Any] | None = None
    """(module, x, scores, anchors) -> what is added to the mean loss of these examples, a scalar of the engine."""
    begin: Callable[[Any], None] | None = None  # (module): called once before it, however many micro-batches there are


@dataclass(frozen=True)
class Hooks:
    """What a method changes of training; as it stands, nothing.

    An engine takes those it can carry out and refuses the others by name: the numpy engine has no
    module, hence no `prepare`, `penalty` and `begin`, and takes one turn.
    """

    correct: Callable[[Any, Any, Mapping[str, Any]], Any] | None = None
    """(gradient, value, at) -> the gradient to use for one tensor, in the engine's own array type, before
    clipping. `at[anchor]` is that anchor's tensor of the same name. Plain arithmetic works in every engine."""
    anchors: Mapping[str, Tensors] = field(default_factory=dict)
    """Further tensors, each under the names of what is trained. One is always there: "start", what was received."""
    prepare: Callable[[Any], Any] | None = None
    """(module) -> the module to train: with gates, masks, adapters or a forward pass of its own. What it holds
    is what `start` has to hold, and what is returned."""
    inputs: Callable[[Any], Any] | None = None  # stored examples -> what the network takes; None: by its table
    turns: tuple[Turn, ...] = (Turn(),)  # taken one after another on every mini-batch; the last one's loss is told


class Trainer(Engine, Protocol):
    """An engine that trains a network named by a table, `{"name": "mlp"}` (`fedquilt.models.networks.registry`)."""

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
        """The trained tensors and metrics: "loss", the last epoch's mean, and "steps", the mini-batches.

        `progress` is told after every mini-batch; what it raises ends the training.

        Raises:
            UpdateError: the loss is no longer finite, or has exploded.
            ModelError: `start` or an anchor does not fit the network, or the engine cannot carry out a hook.
        """
        ...

    def evaluate(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, hooks: Hooks = Hooks()
    ) -> dict[str, float]:
        """{"examples", "accuracy" (0..1), "loss" (mean)}. Of the hooks, `prepare` and `inputs` count."""
        ...

    def fisher(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, each: int = 1, hooks: Hooks = Hooks()
    ) -> Tensors:
        """Of every parameter the mean squared gradient of log p(y | x): the empirical Fisher information's diagonal.

        In evaluation mode, `each` examples' gradients averaged before the square. Of the hooks, `prepare` and
        `inputs` count.

        Raises:
            DataError: there are no examples.
            ModelError: as `train`.
        """
        ...


class Runner(Engine, Protocol):
    """An engine that runs ONNX graphs, one resident at a time unless its budget allows more."""

    @property
    def room_bytes(self) -> int:
        """What weights, activations and all else may hold beside the bare process."""
        ...

    def batch(self, graph: Path, around_bytes: int = 0, example_bytes: int = 0) -> int:
        """How many examples to run at once, beside so many bytes in all, and so many more for each of them."""
        ...

    def make_room(self, size: int) -> None:
        """Let go of what is held for later runs until so many bytes are free, as far as that helps."""
        ...

    def run(self, graph: Path, x: np.ndarray) -> np.ndarray:
        """The graph's only output for its only input, float32, in micro-batches along axis 0."""
        ...


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What a board's sensors say now. None: not measurable here."""

    energy_j: float | None = None  # by the board's own counter, since the device object was made
    energy_source: str | None = None  # what `energy_j`, or else `power_w`, is read from
    power_w: float | None = None  # of the whole board, as far as its rails tell
    rails_w: dict[str, float] = {}  # by label; some are parts of others
    temperature_c: float | None = None  # the hottest zone
    available_bytes: int | None = None
    memory_pressure: float | None = None  # share of the last 10 s in which something waited for memory, 0..1
    battery: float | None = None  # charge, 0..1; None: no battery
    charging: bool | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one task took on a board. On a simulated board it is what its profile predicts. Fields as in `Usage`."""

    duration_s: float
    energy_j: float | None = None
    idle_j: float | None = None
    energy_error_j: float | None = None
    energy_source: str | None = None
    point: str | None = None


class Device(Protocol):
    """A board: real or simulated. What is unknown is None."""

    board: str
    memory_bytes: int
    points: tuple[OperatingPoint, ...]  # (): not known
    idle_w: float | None
    provenance: str  # of the numbers above, as in `Profile`
    adjustable: bool  # whether `hold` can set clocks here

    @property
    def holds(self) -> bool:
        """Whether what `hold` set is still so, as of the last `read`: what sets the clocks may let go by itself."""
        ...

    def read(self, now_s: float) -> Reading: ...

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """Hold the clocks at one of `points`; what the board then says that they are.

        Raises:
            ClockError: not adjustable, no such point, too hot, or the board took something else.
        """
        ...

    def release(self) -> None:
        """Give the clocks back to the board's own governor, as they were before the first `hold`."""
        ...

    def cost(self, work: Work, measured: Cost) -> Cost:
        """What a task took: as it was measured, or as a simulated board's profile tells at the point it is held at."""
        ...


def derive_seed(*keys: object) -> int:
    """A 53-bit seed from any keys: the same keys give the same seed on every machine and Python."""
    return derived(*keys[:-1])(keys[-1])


def derived(*keys: object) -> Callable[[object], int]:
    """`derive_seed` of these keys and one more, for many: what they have in common is hashed once."""
    begun = hashlib.sha256("".join(f"{key}\x1f" for key in keys).encode())

    def seed(last: object) -> int:
        whole = begun.copy()
        whole.update(str(last).encode())
        return int.from_bytes(whole.digest()[:8], "big") >> 11

    return seed
