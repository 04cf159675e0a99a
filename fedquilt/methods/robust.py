"""Robust aggregation: median, trimmed mean, Krum, Multi-Krum, norm clipping and bucketing.

Papers: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017
(arXiv 1703.02757), sections 4 and 5. With n updates of which f are arbitrary, Krum selects the update with the least
sum of squared distances to its n - f - 2 nearest neighbours, and Multi-Krum averages the n - f best updates. Yin et
al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018 (arXiv 1803.01498),
Definitions 1 and 2: the median of every value, or the mean without the f largest and the f smallest. Sun et al., Can
You Really Backdoor Federated Learning? (arXiv 1911.07963), section 4: changes longer than a norm are clipped to the
norm (`clipped`). Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022
(arXiv 2006.09365), Algorithm 1: a rule receives means of `bucket` updates drawn at random, which differ less than
single updates if devices have different data.

docs/security.md has measurements of which attacks each rule stops.

These rules need all updates of a round at once: the coordinator holds up to `most` models in memory, and reads them in
blocks of 65,536 values, which take 8 bytes for each value of each update, about three times as much during sorting.
Krum compares every two updates, n^2 / 2 passes over a model. With more devices, `most` of them count, drawn by the
job's seed. Other methods that need all updates at once use the same function (`collect_update`).

Deviations: models replace gradients, as usual with local epochs. f is a share of the received updates, rounded down,
and the log reports an f of 0. Updates are not weighted by the examples that they claim. Counters and running statistics
of batch normalisation take the median with every rule, and are no part of distances and norms: otherwise an attacker
could send an honest model with any variance. A job whose rounds may close with too few updates for the rule is refused.
A round with too few updates changes nothing, and the log reports it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import numpy as np
from msgspec import Meta

from fedquilt.arrays import tensors
from fedquilt.core import Aggregation, Bundle, DeviceUpdate, Tensors, derive_seed
from fedquilt.methods import fedavg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState

BLOCK_VALUES: Final = 1 << 16  # values of a tensor that are read from all updates at once
RULES_WITH_ATTACKERS = ("trimmed_mean", "krum", "multi_krum")  # rules that leave out updates of assumed attackers


def assumed_attackers(share: float, updates: int) -> int:
    """Return f, the number of arbitrary updates that the rule assumes."""
    return int(share * updates + 1e-9)


@dataclass(frozen=True)
class Params(fedavg.Params):
    """FedAvg's parameters, the aggregation rule and the assumed share of attackers."""

    rule: Literal["trimmed_mean", "median", "krum", "multi_krum", "clipped"] = "trimmed_mean"
    attackers: Annotated[float, Meta(ge=0, lt=0.5)] = 0.2  # f / n: share of a round's updates that may be arbitrary
    bucket: Annotated[int, Meta(ge=1)] = 1  # s: updates that are averaged at random before the rule; 1: no buckets
    radius: Annotated[float, Meta(ge=0)] = 0.0  # of "clipped": largest norm of a change; 0: the round's median norm
    most: Annotated[int, Meta(ge=1)] = 32  # updates of a round in memory at once, each as large as the model

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._tolerates(self.most):
            f, rows = assumed_attackers(self.attackers, self.most), "updates" if self.bucket == 1 else "buckets"
            raise ValueError(
                f"most = {self.most}, bucket = {self.bucket}, attackers = {self.attackers:g} allow no round: "
                f"{self.rule} requires more than {'2 f + 2' if 'krum' in self.rule else '2 f'} {rows}, with f = {f}"
            )

    def minimum_updates(self) -> int:
        """Return the number of updates from which on the rule tolerates the assumed attackers."""
        return 1 + max((count for count in range(self.most) if not self._tolerates(count)), default=0)

    def _tolerates(self, updates: int) -> bool:
        return tolerates_attackers(self.rule, updates, assumed_attackers(self.attackers, updates), self.bucket)


@dataclass(frozen=True)
class State(NetworkState):
    """Global model, and log sentences on the latest round."""

    seed: int
    log: tuple[str, ...] = ()


@dataclass(frozen=True)
class CollectedUpdates:
    """Updates of a round by device, up to a limit, and the number of updates that were left out."""

    updates: Mapping[str, Mapping[str, np.ndarray]]
    left_out: int = 0
    round: int = 0

    def left_out_note(self, noun: str) -> list[str]:
        """Return a sentence with the number of updates left out, or [] if there are none."""
        if not self.left_out:
            return []
        return [f"{self.left_out} {noun} were left out, because at most {len(self.updates)} are compared"]


def collect_update(
    collected: CollectedUpdates | None, update: DeviceUpdate, name: str, reference: Tensors, max_updates: int, seed: int
) -> CollectedUpdates:
    """Return the collected updates with the bundle `name` of an update added.

    If there are more than `max_updates`, `seed` alone decides which stay, whatever their order of arrival.

    Raises:
        UpdateError: If a tensor's name, shape or type differs from `reference`, or a number is out of range.
    """
    new_bundle = update.bundles.get(name, {})
    tensors.require_addable(new_bundle, reference)
    updates = {**(collected.updates if collected else {}), update.device: new_bundle}
    left_out = collected.left_out if collected else 0
    if len(updates) <= max_updates:
        return CollectedUpdates(updates, left_out, update.round)
    dropped_device = max(sorted(updates), key=lambda device: derive_seed(seed, "held", update.round, device))
    return CollectedUpdates(
        {device: bundle for device, bundle in updates.items() if device != dropped_device}, left_out + 1, update.round
    )


def init(bundle: Bundle, params: Any, seed: int) -> State:
    """Return FedAvg's first state with the seed that draws updates and buckets."""
    return State(**vars(fedavg.init(bundle, params, seed)), seed=seed)


def fold(state: State, collected: CollectedUpdates | None, update: DeviceUpdate) -> CollectedUpdates:
    """Return the collected updates with an update added, for up to `most` devices in a round."""
    return collect_update(collected, update, "model", state.model, state.params["most"], state.seed)


def step(state: State, total: CollectedUpdates | None) -> State:
    """Return the state with the rule's aggregate, or the same model after too few updates."""
    if total is None:
        return state
    devices, rule, size = sorted(total.updates), state.params["rule"], state.params["bucket"]
    f = assumed_attackers(state.params["attackers"], len(devices))
    notes = total.left_out_note("updates")
    if not tolerates_attackers(rule, len(devices), f, size):
        too_few = f"{len(devices)} updates are too few for {rule} with {f} attackers: the model is unchanged"
        return replace(state, log=(*notes, too_few))
    if rule in RULES_WITH_ATTACKERS and state.params["attackers"] and not f:
        notes.append(f"{rule} left no update out, because {len(devices)} updates are too few to assume an attacker")
    groups = None
    if size > 1:
        groups = draw_buckets(len(devices), size, tensors.seeded_rng(state.seed, "buckets", total.round))
    updates = [total.updates[device] for device in devices]
    rows, trained_names = UpdateRows(updates, groups), state.trained_names()
    row_names = devices if groups is None else ["+".join(devices[index] for index in group) for group in groups]
    merged, sentence = _aggregate_by_rule(state, rows, trained_names, f, row_names)
    other_names = [name for name in state.model if name not in merged]
    model = {**merged, **median(UpdateRows(updates), other_names)}
    return replace(state, model={name: model[name] for name in state.model}, log=(*notes, *sentence))


def _aggregate_by_rule(
    state: State, rows: UpdateRows, names: list[str], f: int, row_names: list[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the rule's aggregate of the named tensors, and a log sentence on the rule's effect, or []."""
    rule, radius = state.params["rule"], state.params["radius"]
    if rule == "trimmed_mean":
        return trimmed_mean(rows, names, f), []
    if rule == "median":
        return median(rows, names), []
    if rule == "clipped":
        lengths = difference_norms(rows, names, state.model)
        radius = radius or float(np.median(lengths))
        clipped_count = int((lengths > radius).sum())
        changes = f"{clipped_count} of {len(rows)} changes"
        note = f"{changes} were clipped to the norm {radius:.3g}, the largest from {lengths.max():.3g}"
        return clipped_mean(rows, names, state.model, lengths, radius), [note] if clipped_count else []
    count = 1 if rule == "krum" else len(rows) - f
    best = sorted(np.argsort(krum_scores(rows, names, f), kind="stable")[:count].tolist())
    return mean_of_rows(rows, names, best), [f"{rule} chose {', '.join(row_names[index] for index in best)}"]


# -- aggregates of the rules ----------------------------------------------------------------------


class UpdateRows:
    """Updates of a round, or means of groups of updates, as rows that are read in blocks.

    Args:
        updates: Updates with the same names, shapes and types.
        groups: Indices of the updates of each row, or None if each update is a row.
    """

    def __init__(self, updates: Sequence[Tensors], groups: Sequence[Sequence[int]] | None = None) -> None:
        self.updates, self._groups = updates, groups

    def __len__(self) -> int:
        return len(self.updates if self._groups is None else self._groups)

    def empty_arrays(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return an uninitialised array of each named tensor's shape and type."""
        return {name: np.empty(self.updates[0][name].shape, self.updates[0][name].dtype) for name in names}

    def iterate_blocks(self, name: str) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield slice and float64 values, (rows, block), of each block of a flattened tensor."""
        flat = [np.reshape(update[name], -1) for update in self.updates]
        for start in range(0, flat[0].size, BLOCK_VALUES):
            part = slice(start, start + BLOCK_VALUES)
            block = np.stack([values[part] for values in flat]).astype(np.float64)
            if self._groups is not None:
                block = np.stack([block[list(group)].mean(axis=0) for group in self._groups])
            yield part, block


def trimmed_mean(rows: UpdateRows, names: Collection[str], cut: int) -> dict[str, np.ndarray]:
    """Return the mean of every value without the `cut` largest and `cut` smallest.

    The mean of integers is rounded down.

    Args:
        rows: More than 2 * cut rows.
        names: Tensors to return.
        cut: Values to leave out at either end.
    """
    mean_tensors = rows.empty_arrays(names)
    for name, array in mean_tensors.items():
        flat = array.reshape(-1)
        for part, block in rows.iterate_blocks(name):
            block.sort(axis=0)
            flat[part] = block[cut : len(block) - cut].mean(axis=0)
    return mean_tensors


def median(rows: UpdateRows, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the median of every value over the rows."""
    return trimmed_mean(rows, names, (len(rows) - 1) // 2)


def mean_of_rows(rows: UpdateRows, names: Collection[str], row_indices: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the mean of the rows at `row_indices`."""
    mean_tensors = rows.empty_arrays(names)
    for name, array in mean_tensors.items():
        flat = array.reshape(-1)
        for part, block in rows.iterate_blocks(name):
            flat[part] = block[list(row_indices)].mean(axis=0)
    return mean_tensors


def krum_scores(rows: UpdateRows, names: Collection[str], f: int) -> np.ndarray:
    """Return each row's sum of squared distances to its `len(rows) - f - 2` nearest rows, (rows,)."""
    count = len(rows)
    distances = np.zeros((count, count))
    for name in names:
        for _, block in rows.iterate_blocks(name):
            for i in range(1, count):
                distances[i, :i] += np.square(block[:i] - block[i]).sum(axis=1)
    near: np.ndarray = np.sort(distances + distances.T, axis=1)[:, 1 : count - f - 1]  # without the row itself
    return near.sum(axis=1)


def difference_norms(rows: UpdateRows, names: Collection[str], centre: Tensors) -> np.ndarray:
    """Return the norm of each row's difference from `centre`, (rows,)."""
    squares = np.zeros(len(rows))
    for name in names:
        middle = np.reshape(centre[name], -1)
        for part, block in rows.iterate_blocks(name):
            squares += np.square(block - middle[part]).sum(axis=1)
    return np.sqrt(squares)


def clipped_mean(
    rows: UpdateRows, names: Collection[str], centre: Tensors, lengths: np.ndarray, radius: float
) -> dict[str, np.ndarray]:
    """Return `centre` plus the mean of the rows' differences from it, each clipped to norm `radius`.

    Args:
        rows: Models.
        names: Tensors to return.
        centre: Model to subtract.
        lengths: Norms of the differences from `difference_norms`, (rows,).
        radius: Largest norm.
    """
    shares = np.minimum(1.0, radius / np.maximum(lengths, np.finfo(np.float64).tiny))[:, None]
    mean_tensors = rows.empty_arrays(names)
    for name, array in mean_tensors.items():
        flat, middle = array.reshape(-1), np.reshape(centre[name], -1)
        for part, block in rows.iterate_blocks(name):
            flat[part] = middle[part] + (shares * (block - middle[part])).mean(axis=0)
    return mean_tensors


def draw_buckets(count: int, size: int, rng: np.random.Generator) -> list[list[int]]:
    """Return the numbers 0 to `count` - 1 in random groups of `size`. The last group may be smaller."""
    shuffled = rng.permutation(count).tolist()
    return [sorted(shuffled[start : start + size]) for start in range(0, count, size)]


def tolerates_attackers(rule: str, count: int, f: int, size: int) -> bool:
    """Return whether a rule limits the effect of f attackers among `count` updates in buckets of `size`.

    Krum needs more than 2 f + 2 buckets, all other rules more than 2 f.
    """
    return math.ceil(count / size) > 2 * f + (2 if rule in ("krum", "multi_krum") else 0)


METHOD = replace(
    fedavg.METHOD,
    paper="arXiv 1703.02757, arXiv 1803.01498, arXiv 1911.07963, arXiv 2006.09365",
    params=Params,
    state=State,
    init=init,
    aggregation=Aggregation(fold, schema=local_training.full_model_schema),
    step=step,
    explain=lambda state: state.log,
    minimum_updates=Params.minimum_updates,
    traits=replace(fedavg.METHOD.traits, per_device_data="whole models, `most` of them, which the rules compare"),
)
