"""Interfaces of engines: training of networks (`Trainer`) and execution of ONNX graphs (`Runner`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from fedquilt.core.messages import EvaluationSums
from fedquilt.core.method import ClassPrior, Examples, Tensors

if TYPE_CHECKING:
    import numpy as np


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
        """Return the sums over batches of class scores, (n, classes), and classes, which the caller computes."""
        ...
