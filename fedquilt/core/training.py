"""What engines can do: train a network with a method's hooks (`Trainer`), run ONNX graphs (`Runner`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fedquilt.core.method import Examples, Tensors

if TYPE_CHECKING:
    import numpy as np


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
class Step:
    """One step on a mini-batch: which tensors it moves and what it adds to the loss."""

    rate: Callable[[str], float] = lambda name: 1.0  # of a tensor, times `Fit.lr`; 0: it is held still
    penalty: Callable[[Any, Any, Any, Mapping[str, Any]], Any] | None = None
    """(module, x, scores, anchors) -> what is added to the mean loss of these examples, a scalar of the engine."""
    begin: Callable[[Any], None] | None = None  # (module): called once before it, however many micro-batches there are


@dataclass(frozen=True)
class Hooks:
    """What a method changes of training; as it stands, nothing.

    An engine takes those it can carry out and refuses the others by name: the numpy engine has no
    module, hence no `prepare`, `penalty` and `begin`, and takes one step.
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
    steps: tuple[Step, ...] = (Step(),)  # taken one after another on every mini-batch; the last one's loss is told


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
        """{"examples", "loss" (mean)} and the task's metrics ("accuracy", 0..1; see `edge_agent.engines.objectives`).

        Of the hooks, `prepare` and `inputs` count.
        """
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
