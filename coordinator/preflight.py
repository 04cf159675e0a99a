"""Checks of a job before any device is asked: its parameters, bundle, first state, and requirements on devices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedquilt import methods, plugins
from fedquilt.coordinator import settings
from fedquilt.core import Bundle, JobError, Method

ENGINES: Final = ("numpy", "onnx", "torch")  # fedquilt's own: edge_agent/engines
NUMPY_TRAINS: Final = "mlp"  # the only network of edge_agent/engines/numpy_engine


def first_state(job: settings.Job, made: Bundle, method: Method | None = None) -> Any:
    """First state of a job. Called before a job is submitted, so that no unfit one is ever queued.

    Args:
        job: settings as read.
        made: bundle prepared for it.
        method: the job's; None: looked up by name.

    Raises:
        JobError: an unknown or unfit parameter, an evaluation that the method lacks, or an engine that cannot train the
            bundle's network.
        ModelError: the method cannot train the bundle's network, or cannot use its donors; gives the reason.
    """
    method = method or methods.load(job.method)
    if job.check.every and method.check is None:
        raise JobError(f"[check] every: {job.method} has no evaluation of its own; leave it 0")
    network = made.meta.get("network", {})
    settings.require_task(job.method, method, network)
    if job.engine == "numpy" and network.get("name", NUMPY_TRAINS) != NUMPY_TRAINS:
        raise JobError(
            f'engine = "numpy" trains {NUMPY_TRAINS!r} networks, and [model] is {network.get("name")!r}: leave the '
            "line out, so that devices train with torch"
        )
    return method.init(made, settings.params(job), job.seed)


def needs(job: settings.Job, made: Bundle) -> dict[str, str]:
    """Packages a device needs beside fedquilt: for the job's method and engine, and for the bundle's network.

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

    Compared are the network of [model], its input ([input], or `input` of [model]), the names of [[donors]], and the
    labels. A key that the job leaves out may have any value in the bundle.

    Raises:
        JobError: the bundle was visibly prepared from other tables; names them.
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
    """Value as after a passage through JSON: 1 and 1.0 are equal there, as are a tuple and a list."""
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
