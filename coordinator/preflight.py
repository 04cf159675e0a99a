"""Check a job before any device is asked: its parameters, its bundle, its first state, what devices need for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedquilt import methods, plugins
from fedquilt.coordinator import settings
from fedquilt.core import Bundle, JobError, Method

ENGINES: Final = ("numpy", "onnx", "torch")  # fedquilt's own: edge_agent/engines


def first_state(job: settings.Job, made: Bundle, method: Method | None = None) -> Any:
    """What a job begins with. Whoever submits a job calls this first, so that no unfit one is ever queued.

    Args:
        method: the job's; None: the one of that name.

    Raises:
        JobError: an unknown or unfit parameter, or an evaluation that the method does not have.
        ModelError: the method cannot train the bundle's network, or cannot use its donors; says what it wants.
    """
    method = method or methods.load(job.method)
    if job.check.every and method.check is None:
        raise JobError(f"[check] every: {job.method} has no evaluation of its own; leave it 0")
    settings.require_task(job.method, method, made.meta.get("network", {}))
    return method.init(made, settings.params(job), job.seed)


def needs(job: settings.Job, made: Bundle) -> dict[str, str]:
    """What a device has to have beside fedquilt: of the job's method and engine, and of the bundle's network.

    Raises:
        JobError: the method or engine is not installed here.
    """
    found = methods.needs(job.method)
    if job.engine is not None and job.engine not in ENGINES:
        found |= plugins.needs("engine", job.engine)
    told = made.meta.get("plugins")
    return dict(sorted({**found, **(told if isinstance(told, Mapping) else {})}.items()))


def require_made_for(job: settings.Job, made: Bundle) -> None:
    """Check that a bundle was prepared from this job, or from one with the same network, inputs and donors.

    Compared are the network of [model], what goes into it ([input], or `input` of [model]), the names of [[donors]],
    and the labels. A key that the job leaves out may have any value in the bundle.

    Raises:
        JobError: the bundle was visibly prepared from other tables; says which.
    """
    known = dict(made.meta.get("network", {}))
    into = made.meta.get("input") or known.pop("input", None) or {}
    network = {key: value for key, value in job.model.items() if key not in ("input", *settings.NOT_NETWORK)}
    wanted = job.input or job.model.get("input") or {}
    odd = [
        *(["[model]"] if network and network != {key: known[key] for key in known if key != "input"} else []),
        *(["[input]"] if any(_plain(into.get(key)) != _plain(value) for key, value in wanted.items()) else []),
    ]
    if job.donors:
        names = [donor.get("name") for donor in job.donors]
        odd += ["[[donors]]"] if names != list(made.meta.get("donors", {})) else []
    if job.labels and "labels" in made.meta:
        odd += _odd_labels(job.labels, made.meta["labels"])
    if odd:
        raise JobError(
            f"the bundle was prepared from another job than this ({' and '.join(odd)} differ): "
            "make it anew with `fedquilt prepare`"
        )


def _odd_labels(wanted: Sequence[str], given: Sequence[str]) -> list[str]:
    """Where the job's labels first differ from the bundle's, in words; [] where they are the same in the same order."""
    for number, (ours, theirs) in enumerate(itertools.zip_longest(wanted, given)):
        if ours != theirs:
            told = ["none" if each is None else repr(each) for each in (ours, theirs)]
            return [f"labels (label {number} is {told[0]} in the job and {told[1]} in the bundle)"]
    return []


def _plain(value: Any) -> Any:
    """As it is in JSON: a job file's 1 and 1.0, a tuple and a list are the same there."""
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
