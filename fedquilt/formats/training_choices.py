"""Training choices in [params]: loss, optimizer, schedule and augmentation. Imports no torch.

A choice is a name, or a table with a name and its arguments: `"focal"`, `{ name = "focal", gamma = 1.5 }`. Losses and
augmentations of other packages are plug-ins (`fedquilt.plugins`), and other optimizers are classes of `torch.optim`.
Their arguments are checked on the device, and in the dry run of `fedquilt prepare`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from fedquilt.core import Choice, JobError
from fedquilt.formats import toml

T = TypeVar("T")
Positive: TypeAlias = Annotated[float, Meta(gt=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


# -- losses ---------------------------------------------------------------------------------------


class CrossEntropy(Arguments, frozen=True):
    smoothing: Share = 0.0  # of labels
    weights: tuple[Positive, ...] = ()  # of each class, as in torch


class Focal(Arguments, frozen=True):
    gamma: Annotated[float, Meta(ge=0)] = 2.0
    weights: tuple[Positive, ...] = ()  # alpha of each class


class BinaryCrossEntropy(Arguments, frozen=True):
    weights: tuple[Positive, ...] = ()  # of each label where it is 1


class Huber(Arguments, frozen=True):
    delta: Positive = 1.0


class Quantile(Arguments, frozen=True):
    quantiles: Annotated[tuple[Annotated[float, Meta(gt=0, lt=1)], ...], Meta(min_length=1)] = (0.5,)  # of each output


LOSSES: Final[Mapping[str, tuple[type[Arguments], str]]] = {
    "cross_entropy": (CrossEntropy, "classes"),
    "focal": (Focal, "classes"),
    "bce": (BinaryCrossEntropy, "labels"),
    "mse": (Arguments, "regression"),
    "huber": (Huber, "regression"),
    "quantile": (Quantile, "regression"),
}
"""Arguments of each loss, and the kind of task for which the loss is defined."""


# -- optimizers -----------------------------------------------------------------------------------


class Adam(Arguments, frozen=True):
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Positive = 1e-8


OPTIMIZERS: Final[Mapping[str, type[Arguments]]] = {"sgd": Arguments, "adam": Adam, "adamw": Adam}
PARAMS_KEYS: Final = ("lr", "weight_decay", "momentum", "nesterov")  # arguments of optimizers that [params] has


# -- schedules ------------------------------------------------------------------------------------


class Schedule(Arguments, frozen=True):
    """Learning-rate schedule of a job, which computes a factor on `lr`. Lengths are in rounds."""

    over: Literal["rounds", "steps"] = "rounds"  # constant in a round, or new at every step
    warm_up: Annotated[int, Meta(ge=0)] = 0  # rounds in which the rate rises linearly, before the schedule begins
    rounds: Annotated[int, Meta(ge=0)] = 0  # length of the job, or 0 if unknown

    def rate_factor(self, round: int, step: int = 0, steps: int = 1) -> float:
        """Return the factor on `lr` at a step of a round, counted from 0, with `steps` steps in a round."""
        scale = steps if self.over == "steps" else 1
        position = round * scale + (step if self.over == "steps" else 0)
        rise = self.warm_up * scale
        if position < rise:
            return (position + 1) / (rise + 1)
        return self._main_factor(position - rise, scale)

    def step_factor(self, round: int, step: int, steps: int) -> float:
        """Return the factor on the round's rate at a step: 1, unless the rate changes within rounds."""
        return self.rate_factor(round, step, steps) if self.over == "steps" else 1.0

    def _main_factor(self, step: int, scale: int) -> float:
        """Return the factor at `step`, counted from the end of the warm-up, with `scale` steps in a round."""
        return 1.0

    def _length(self, scale: int) -> int:
        self.require_rounds()
        return (self.rounds - self.warm_up) * scale

    def require_rounds(self) -> None:
        if self.rounds <= self.warm_up:
            raise JobError(
                f"[params] schedule: warm_up = {self.warm_up} is not below rounds = {self.rounds}: raise the job's "
                "rounds"
            )


class StepDecay(Schedule, frozen=True):
    every: Annotated[int, Meta(ge=1)] = 1  # rounds between two falls
    factor: Annotated[float, Meta(gt=0, le=1)] = 0.1

    def _main_factor(self, step: int, scale: int) -> float:
        return float(self.factor) ** (step // (self.every * scale))


class Cosine(Schedule, frozen=True):
    least: Share = 0.0  # factor at the end

    def _main_factor(self, step: int, scale: int) -> float:
        length = self._length(scale)
        return self.least + (1 - self.least) * (1 + math.cos(math.pi * min(step, length - 1) / length)) / 2


class OneCycle(Schedule, frozen=True):
    """Leslie Smith's 1cycle policy (arXiv 1708.07120), as in torch with cosines. `lr` is the highest rate."""

    rise: Annotated[float, Meta(gt=0, lt=1)] = 0.3  # share of the steps that rise
    first: Annotated[float, Meta(gt=0, le=1)] = 0.04  # factor at first
    last: Annotated[float, Meta(gt=0, le=1)] = 4e-6  # factor at the end

    def _main_factor(self, step: int, scale: int) -> float:
        length = self._length(scale)
        top, end = self.rise * length - 1, length - 1
        if top <= 0 and self.over == "rounds":
            raise JobError(
                f"[params] schedule: one_cycle has {length} steps, of which less than 2 rise (rise = {self.rise:g}): "
                'raise the job\'s rounds or rise, or set over = "steps"'
            )
        top, step = max(top, 0.0), min(step, end)  # a device with few steps begins at the highest rate
        if step < top:
            return 1 + (self.first - 1) * (1 + math.cos(math.pi * step / top)) / 2
        if step == top:
            return 1.0
        return self.last + (1 - self.last) * (1 + math.cos(math.pi * (step - top) / (end - top))) / 2


SCHEDULES: Final[Mapping[str, type[Schedule]]] = {
    "constant": Schedule,
    "step": StepDecay,
    "cosine": Cosine,
    "one_cycle": OneCycle,
}


# -- augmentations --------------------------------------------------------------------------------


class Mixup(Arguments, frozen=True):
    alpha: Positive = 0.2  # of the Beta distribution of shares


MIXUP: Final = "mixup"
BUILT_IN_CHOICES: Final[Mapping[Literal["loss", "transform"], Sequence[str]]] = {
    "loss": tuple(LOSSES),
    "transform": (MIXUP,),
}


# -- reading --------------------------------------------------------------------------------------


def split_choice(choice: Choice, key: str) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a choice, or raise JobError for a table without a name."""
    if isinstance(choice, str):
        return choice, {}
    name, arguments = choice.get("name"), {argument: value for argument, value in choice.items() if argument != "name"}
    if not isinstance(name, str):
        raise JobError(f'[params] {key} = {dict(choice)} has no name: write {{ name = "...", ... }}')
    return name, arguments


def parse_arguments(name: str, arguments: Mapping[str, Any], kind: type[T], key: str) -> T:
    return toml.convert_table(dict(arguments), kind, f"[params] {key} {name!r}")


def parse_loss(choice: Choice) -> tuple[str, Any]:
    """Return name and arguments of a loss: a struct of LOSSES, or a plain table of other losses."""
    name, arguments = split_choice(choice, "loss")
    return name, parse_arguments(name, arguments, LOSSES[name][0], "loss") if name in LOSSES else arguments


def parse_optimizer(choice: Choice) -> tuple[str, Any]:
    """Return name and arguments of an optimizer: a struct of OPTIMIZERS, or a table for `torch.optim`."""
    name, arguments = split_choice(choice, "optimizer")
    for key in PARAMS_KEYS:
        if key in arguments:
            raise JobError(f"[params] optimizer {name!r} has {key} = {arguments[key]!r}: set [params] {key} instead")
    optimizer = OPTIMIZERS.get(name)
    if optimizer is None and not name[:1].isupper():
        choices_text = toml.describe_choices(name, OPTIMIZERS)
        raise JobError(f"[params] optimizer = {name!r}{choices_text}, or a class of torch.optim, such as 'RMSprop'")
    if optimizer is None and name.lower() in OPTIMIZERS:
        raise JobError(f"[params] optimizer = {name!r}: write {name.lower()!r}")
    return name, arguments if optimizer is None else parse_arguments(name, arguments, optimizer, "optimizer")


def parse_schedule(choice: Choice) -> Schedule:
    name, arguments = split_choice(choice, "schedule")
    if name not in SCHEDULES:
        raise JobError(f"[params] schedule = {name!r}{toml.describe_choices(name, SCHEDULES)}")
    return parse_arguments(name, arguments, SCHEDULES[name], "schedule")


def schedule_with_rounds(choice: Choice, rounds: int) -> Choice:
    """Return a schedule for this number of rounds, or raise JobError if the schedule needs more."""
    name, arguments = split_choice(choice, "schedule")
    if set(arguments) <= {"rounds"} and name == "constant":
        return choice
    full_choice = {"name": name, "rounds": rounds, **arguments}
    schedule = parse_schedule(full_choice)
    schedule.require_rounds()
    schedule.rate_factor(schedule.rounds - 1, 0, 1_000 if schedule.over == "steps" else 1)
    return full_choice


def parse_augmentations(choices: Sequence[Choice]) -> list[tuple[str, Any]]:
    """Return name and arguments of each augmentation, or raise JobError if "mixup" is not last."""
    augmentations = [split_choice(choice, "augment") for choice in choices]
    if MIXUP in [name for name, _ in augmentations[:-1]]:
        raise JobError("[params] augment: mixup is not the last transform: write it once, after all others")
    return [
        (name, parse_arguments(name, arguments, Mixup, "augment") if name == MIXUP else arguments)
        for name, arguments in augmentations
    ]


def is_plugin_transform(name: str) -> bool:
    return name != MIXUP and (":" in name or not name[:1].isupper())


def require_valid_choices(params: Any) -> None:
    parse_loss(params.loss)
    parse_optimizer(getattr(params, "optimizer", "adam"))
    parse_schedule(params.schedule)
    parse_augmentations(params.augment)


def select_choices(kind: type, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return `params` if `kind`, the method's parameter type, has all training choices, or {} otherwise."""
    field_names = {field.name for field in dataclasses.fields(kind)}
    return dict(params) if {"loss", "schedule", "augment", "accumulate", "ema"} <= field_names else {}


def list_plugins(params: Mapping[str, Any]) -> list[tuple[Literal["loss", "transform"], str]]:
    """Return kind and name of each loss and transform that is a plug-in."""
    loss, _ = split_choice(params.get("loss", ""), "loss")
    plugins: list[tuple[Literal["loss", "transform"], str]] = [("loss", loss)] if loss and loss not in LOSSES else []
    names = [split_choice(choice, "augment")[0] for choice in params.get("augment", ())]
    return plugins + [("transform", name) for name in names if is_plugin_transform(name)]


def describe_torch_choices(params: Mapping[str, Any]) -> str:
    """Return the parameters that only torch supports as text, "ema = 0.9 and accumulate = 2", or ""."""
    optimizer, arguments = parse_optimizer(params.get("optimizer", "sgd"))
    needs = {
        "loss": params.get("loss"),
        "optimizer": optimizer not in ("sgd", "adam") or arguments not in (Arguments(), Adam()),
        "schedule": parse_schedule(params.get("schedule", "constant")).over == "steps",
        "augment": params.get("augment"),
        "accumulate": params.get("accumulate", 1) > 1,
        "ema": params.get("ema"),
    }
    return " and ".join(f"{key} = {params[key]!r}" for key, value in needs.items() if value)
