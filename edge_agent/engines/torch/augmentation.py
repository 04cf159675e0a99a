"""Random changes of training examples: transforms of torchvision, plug-ins, and mixup.

What is drawn depends on the task's seed, the mini-batch and the example's place in the mini-batch, not on the
micro-batches into which a budget divides it.
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
    batch: np.ndarray  # rows of the whole mini-batch
    places: np.ndarray  # within `batch`
    number: int  # of the pass over a mini-batch


def divide_batch(batch: np.ndarray, most: int, number: int) -> list[Part]:
    return [Part(batch, places, number) for places in training.micro_batches(np.arange(len(batch)), most)]


class Augmentation:
    def __init__(self, choices: Sequence[Choice], seed: int) -> None:
        found = training_choices.parse_augmentations(choices)
        self._seed = seed
        self._transforms = [
            (name, load_transform(name, given)) for name, given in found if name != training_choices.MIXUP
        ]
        self._alphas = [given.alpha for name, given in found if name == training_choices.MIXUP]
        self._is_checked = False

    @property
    def is_used(self) -> bool:
        return bool(self._transforms or self._alphas)

    def transform_examples(self, x: np.ndarray, part: Part, places: np.ndarray) -> np.ndarray:
        """Return the examples of a part after the transforms."""
        if not self._transforms or not len(x):
            return x
        with _kept_random_state():
            one, again = (x[:1], x[:1]) if self._is_checked else [self._transform(x[0], part, 0) for _ in range(2)]
            if not np.array_equal(one, again, equal_nan=one.dtype.kind == "f"):
                names = " and ".join(name for name, _ in self._transforms)
                raise JobError(f"[params] augment {names}: two calls differ with one seed; draw with torch's generator")
            self._is_checked = True
            return np.stack([self._transform(one, part, int(place)) for one, place in zip(x, places, strict=True)])

    def mixture_of_part(self, part: Part) -> tuple[float, np.ndarray] | None:
        """Return mixup's share and, for each example of the mini-batch, the place of the other one, or None."""
        if not self._alphas:
            return None
        rng = np.random.default_rng((self._seed, part.number))
        return float(rng.beta(self._alphas[0], self._alphas[0])), rng.permutation(len(part.batch))

    def _transform(self, one: np.ndarray, part: Part, place: int) -> np.ndarray:
        seed = np.random.SeedSequence((self._seed, part.number, place)).generate_state(1, np.uint64)[0]
        torch.default_generator.manual_seed(int(seed))
        is_image = one.dtype.kind == "u" and one.ndim in (2, 3)  # (h, w) or (h, w, c), and transforms take (c, h, w)
        value = torch.from_numpy(np.array(one))
        if is_image:
            value = value[None] if one.ndim == 2 else value.permute(2, 0, 1)
        for name, transform in self._transforms:
            value = _call_transform(name, transform, value)
        if is_image:
            value = value[0] if one.ndim == 2 else value.permute(1, 2, 0)
        return value.numpy()


def _call_transform(name: str, transform: Transform, value: torch.Tensor) -> torch.Tensor:
    shape, kind = tuple(value.shape), value.dtype
    try:
        found = transform(value)
    except Exception as error:  # torchvision and code from outside may raise anything
        raise JobError(
            f"[params] augment {name!r} fails with an example of shape {shape} and type {kind}: {first_line(error)}"
        ) from error
    told = (tuple(found.shape), found.dtype) if isinstance(found, torch.Tensor) else type(found).__name__
    if told != (shape, kind):
        told = " of ".join(map(str, told)) if isinstance(told, tuple) else told
        raise JobError(
            f"[params] augment {name!r} returned {told} for an example {shape} of {kind}: a transform keeps shape and "
            "type, and never gets labels"
        )
    return found


def load_transform(name: str, arguments: Mapping[str, Any]) -> Transform:
    if training_choices.is_own_transform(name):
        function = training_step.load_function("transform", name, arguments, values=1)
        return lambda value: function(value, **arguments)
    where = f"[params] augment {name!r}"
    torchvision_compat.import_torchvision()
    v2 = importlib.import_module("torchvision.transforms.v2")
    kind = getattr(v2, name, None)
    if not (isinstance(kind, type) and issubclass(kind, v2.Transform)):
        near = toml.suggest_nearest(name, [each for each in dir(v2) if each[:1].isupper()])
        raise JobError(f"{where}: torchvision.transforms.v2 has no such transform{near}; your own is module:name")
    training_step.require_arguments(where, kind, 0, arguments)
    try:
        made: Transform = kind(**arguments)
    except (TypeError, ValueError) as error:
        raise JobError(f"{where}: {arguments}: {first_line(error)}") from None
    return made


@contextmanager
def _kept_random_state() -> Iterator[None]:
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
