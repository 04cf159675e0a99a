"""Random changes of training examples: transforms of torchvision, plug-ins, and mixup.

Random numbers depend on the task's seed, the mini-batch and the example's position in the mini-batch. They do not
depend on the division into micro-batches, which follows from the memory budget.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from fedquilt.core import Choice, JobError
from fedquilt.core.errors import first_line
from fedquilt.edge_agent.engines import training
from fedquilt.edge_agent.engines.torch import training_step
from fedquilt.formats import toml, training_choices
from fedquilt.host import torchvision_compat

Transform = Callable[[torch.Tensor], Any]


class Part(NamedTuple):
    batch: np.ndarray  # row numbers of the whole mini-batch
    positions: np.ndarray  # positions of this part's examples in `batch`
    number: int  # number of the pass over a mini-batch, part of the seed


def divide_batch(batch: np.ndarray, max_examples: int, number: int) -> list[Part]:
    return [Part(batch, positions, number) for positions in training.micro_batches(np.arange(len(batch)), max_examples)]


class Augmentation:
    def __init__(self, choices: Sequence[Choice], seed: int) -> None:
        augmentations = training_choices.parse_augmentations(choices)
        self._seed = seed
        self._transforms = [
            (name, load_transform(name, arguments))
            for name, arguments in augmentations
            if name != training_choices.MIXUP
        ]
        self._alphas = [arguments.alpha for name, arguments in augmentations if name == training_choices.MIXUP]
        self._is_checked = False

    @property
    def is_used(self) -> bool:
        return bool(self._transforms or self._alphas)

    def transform_examples(self, x: np.ndarray, part: Part, positions: np.ndarray) -> np.ndarray:
        """Return the transformed examples `x`, which have these `positions` in the mini-batch.

        Raise JobError if a transform fails or does not follow torch's seed.
        """
        if not self._transforms or not len(x):
            return x
        with _kept_random_state():
            example, repeated = (
                (x[:1], x[:1]) if self._is_checked else [self._transform(x[0], part, 0) for _ in range(2)]
            )
            if not np.array_equal(example, repeated, equal_nan=example.dtype.kind == "f"):
                names = " and ".join(name for name, _ in self._transforms)
                raise JobError(
                    f"[params] augment {names} gives two results for one seed: draw numbers from torch's generator"
                )
            self._is_checked = True
            return np.stack(
                [self._transform(example, part, int(position)) for example, position in zip(x, positions, strict=True)]
            )

    def mixture_of_part(self, part: Part) -> tuple[float, np.ndarray] | None:
        """Return mixup's share and each example's partner (position in the mini-batch), or None without mixup."""
        if not self._alphas:
            return None
        rng = np.random.default_rng((self._seed, part.number))
        return float(rng.beta(self._alphas[0], self._alphas[0])), rng.permutation(len(part.batch))

    def _transform(self, example: np.ndarray, part: Part, position: int) -> np.ndarray:
        seed = np.random.SeedSequence((self._seed, part.number, position)).generate_state(1, np.uint64)[0]
        torch.default_generator.manual_seed(int(seed))
        # (h, w) or (h, w, c), and transforms take (c, h, w).
        is_image = example.dtype.kind == "u" and example.ndim in (2, 3)
        value = torch.from_numpy(np.array(example))
        if is_image:
            value = value[None] if example.ndim == 2 else value.permute(2, 0, 1)
        for name, transform in self._transforms:
            value = _call_transform(name, transform, value)
        if is_image:
            value = value[0] if example.ndim == 2 else value.permute(1, 2, 0)
        return value.numpy()


def _call_transform(name: str, transform: Transform, value: torch.Tensor) -> torch.Tensor:
    shape, kind = tuple(value.shape), value.dtype
    try:
        transformed = transform(value)
    except Exception as error:  # torchvision and plug-ins may raise any exception
        raise JobError(
            f"[params] augment {name!r} fails with an example of shape {shape} and type {kind}: {first_line(error)}"
        ) from error
    kept_type = (
        (tuple(transformed.shape), transformed.dtype)
        if isinstance(transformed, torch.Tensor)
        else type(transformed).__name__
    )
    if kept_type != (shape, kind):
        kept_type = " of ".join(map(str, kept_type)) if isinstance(kept_type, tuple) else kept_type
        raise JobError(
            f"[params] augment {name!r} returned {kept_type} for an example {shape} of {kind}: use a transform that "
            "keeps shape and type"
        )
    return transformed


def load_transform(name: str, arguments: Mapping[str, Any]) -> Transform:
    """Return a transform of torchvision or a plug-in. Raise JobError for unknown names or arguments."""
    if training_choices.is_plugin_transform(name):
        function = training_step.load_function("transform", name, arguments, values=1)
        return lambda value: function(value, **arguments)
    location = f"[params] augment {name!r}"
    torchvision_compat.import_torchvision()
    v2 = importlib.import_module("torchvision.transforms.v2")
    kind = getattr(v2, name, None)
    if not (isinstance(kind, type) and issubclass(kind, v2.Transform)):
        near = toml.suggest_nearest(name, [attribute for attribute in dir(v2) if attribute[:1].isupper()])
        raise JobError(f"{location} is not in torchvision.transforms.v2{near}: write your own as module:name")
    training_step.require_arguments(location, kind, 0, arguments)
    try:
        transform: Transform = kind(**arguments)
    except (TypeError, ValueError) as error:
        raise JobError(f"{location}: {arguments}: {first_line(error)}") from None
    return transform


@contextmanager
def _kept_random_state() -> Iterator[None]:
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
