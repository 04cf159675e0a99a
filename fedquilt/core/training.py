"""Interfaces of engines: train a network with a method's hooks (`Trainer`), run ONNX graphs (`Runner`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fedquilt.core.messages import EvaluationSums
from fedquilt.core.method import Examples, Tensors

if TYPE_CHECKING:
    import numpy as np


class Engine(Protocol):
    """Common part of all engines: a name and `close`."""

    name: str

    def close(self) -> None:
        """Free what the engine holds: graphs, device memory, threads."""
        ...


@dataclass(frozen=True)
class Fit:
    """Mini-batch training settings."""

    epochs: int = 1
    batch: int = 32
    lr: float = 0.05
    optimizer: Literal["sgd", "adam"] = "sgd"  # Adam with betas 0.9 and 0.999, reset at every task
    momentum: float = 0.0  # of "sgd"
    nesterov: bool = False  # of "sgd" with momentum
    weight_decay: float = 0.0  # added to the gradient: times the weight
    clip: float = 0.0  # largest gradient norm; 0: no clipping
    mixed: bool = False  # 16-bit arithmetic where a GPU has it; weights stay 32-bit


@dataclass(frozen=True)
class Step:
    """One optimiser step on a mini-batch: which tensors it updates and what it adds to the loss."""

    rate: Callable[[str], float] = lambda name: 1.0  # factor on `Fit.lr` by tensor; 0: the tensor is frozen
    penalty: Callable[[Any, Any, Any, Mapping[str, Any]], Any] | None = None
    """(module, x, scores, anchors) -> term added to the mean loss of these examples, a scalar of the engine."""
    begin: Callable[[Any], None] | None = None  # (module): called once before the step, for all its micro-batches


@dataclass(frozen=True)
class Hooks:
    """A method's changes to training; the defaults change nothing.

    An engine refuses by name those it cannot carry out: the numpy engine has no
    module, hence no `prepare`, `penalty` and `begin`, and takes one step.
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
        """Train a network; returns the trained tensors and metrics.

        Metrics are "loss", the last epoch's mean, and "steps", the number of mini-batches. `progress` is called after
        every mini-batch with the share done, 0..1; an exception it raises ends the training.

        Raises:
            UpdateError: the loss is no longer finite, or has exploded.
            ModelError: `start` or an anchor does not fit the network, or the engine cannot carry out a hook.
        """
        ...

    def evaluate(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, hooks: Hooks = Hooks()
    ) -> EvaluationSums:
        """Return the sums of an evaluation. Only the hooks `prepare` and `inputs` apply."""
        ...

    def fisher(
        self, network: Mapping[str, Any], model: Tensors, examples: Examples, *, each: int = 1, hooks: Hooks = Hooks()
    ) -> Tensors:
        """Diagonal of the empirical Fisher information: mean squared gradient of log p(y | x), by parameter.

        In evaluation mode; gradients of `each` examples are averaged before squaring. Only the hooks `prepare` and
        `inputs` apply.

        Raises:
            DataError: there are no examples.
            ModelError: as `train`.
        """
        ...


class Runner(Engine, Protocol):
    """An engine that runs ONNX graphs, one resident at a time unless its budget allows more."""

    @property
    def room_bytes(self) -> int:
        """Bytes for weights, activations and everything else beyond the bare process."""
        ...

    def batch(self, graph: Path, around_bytes: int = 0, example_bytes: int = 0) -> int:
        """Number of examples to run at once, given `around_bytes` in use and `example_bytes` for each of them."""
        ...

    def make_room(self, size: int) -> None:
        """Free what is kept for later runs until `size` bytes are available, as far as possible."""
        ...

    def run(self, graph: Path, x: np.ndarray) -> np.ndarray:
        """The graph's only output for its only input, float32, in micro-batches along axis 0."""
        ...
