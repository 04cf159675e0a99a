"""Settings of differential privacy, and the jobs for which it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from fedquilt.core import JobError, Method

if TYPE_CHECKING:
    from fedquilt.coordinator.settings import JobSettings


class PrivacySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Differential privacy of devices: [privacy] (docs/privacy.md)."""

    epsilon: Annotated[float, Meta(gt=0, le=100)]
    delta: Annotated[float, Meta(gt=0, lt=1)]
    clip: Annotated[float, Meta(gt=0)]  # largest norm of the change that an update makes to the model


def describe_unprotected_numbers(job: JobSettings) -> str:
    """Return a sentence on the numbers in a job's log that [privacy] does not cover, or "" without [privacy]."""
    if job.privacy is None:
        return ""
    has_evaluations = job.check.every and not job.check.beside
    numbers = "training metrics and evaluations of devices" if has_evaluations else "training metrics of devices"
    return f"[privacy] protects the model only: {numbers} are in the log without noise"


def require_private_settings(job: JobSettings, method: Method) -> None:
    """Raise JobError if [privacy] contradicts another setting, or if the method does not support it."""
    if job.privacy is None:
        return
    change = method.aggregation.change
    if change is None or method.evaluation_round is not None:
        raise JobError(
            f"[privacy]: {job.method} uses more of an update than a sum of model changes, which noise cannot hide: "
            "choose a method that averages models, such as fedavg, fedprox or fedopt"
        )
    if not change.supports_noise:
        raise JobError(
            f"[privacy]: {job.method} groups devices by their updates, and noise on sums cannot hide the groups: "
            "choose fedavg, fedprox or fedopt"
        )
    if job.cohort.mode != "synchronous":
        raise JobError(f'[privacy] is not supported with [cohort] mode = "{job.cohort.mode}": set "synchronous"')
    if job.cohort.turns != type(job.cohort)().turns:
        raise JobError("[cohort] turns has no effect with [privacy], which selects devices in turn: remove it")


def require_private_network(job: JobSettings, method: Method, state: Any) -> Any:
    """Return the first state of a job, or raise JobError if updates have tensors that noise would make useless."""
    change = method.aggregation.change
    if job.privacy is None or change is None or not (names := change.unprotected_names(state)):
        return state
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise JobError(
        f"[privacy]: noise would make {names[0]}{more} useless, statistics of batch normalisation: choose a network "
        "with group or layer normalisation, or without normalisation"
    )
