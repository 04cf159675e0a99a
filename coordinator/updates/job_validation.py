"""Validation of a job before any device is selected."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedquilt import methods, plugins
from fedquilt.coordinator import settings
from fedquilt.core import Bundle, JobError, Method
from fedquilt.formats import training_choices

ENGINES: Final = ("numpy", "onnx", "torch")  # fedquilt's own: edge_agent/engines
NUMPY_TRAINS: Final = "mlp"  # the only network of edge_agent/engines/numpy_engine.py


def create_initial_state(job: settings.JobSettings, made: Bundle, method: Method | None = None) -> Any:
    """Validate a job with its bundle, and return the initial state of its method.

    Args:
        job: The settings of the job.
        made: The bundle prepared for the job.
        method: The job's method, or None to load the method by its name.

    Raises:
        JobError: If a parameter is invalid, the method has no evaluation, or the engine cannot train the network.
        ModelError: If the method cannot train the bundle's network, or cannot use its donors.
    """
    method = method or methods.load(job.method)
    if job.check.every and method.check is None:
        raise JobError(f"[check] every: {job.method} has no evaluation of its own; leave it 0")
    network = made.meta.get("network", {})
    settings.require_supported_task(job.method, method, network)
    if job.engine == "numpy" and network.get("name", NUMPY_TRAINS) != NUMPY_TRAINS:
        raise JobError(
            f'engine = "numpy" trains {NUMPY_TRAINS!r} networks, and [model] is {network.get("name")!r}: leave the '
            "line out, so that devices train with torch"
        )
    return method.init(made, settings.parse_params(job), job.seed)


def required_packages(job: settings.JobSettings, made: Bundle) -> dict[str, str]:
    """Return the packages that devices need for a job besides fedquilt.

    Keys are modules, and values name the package, its version and the sha256 of its files.

    Raises:
        JobError: If the method, the engine, a loss or a transform is not installed here.
    """
    found = methods.required_plugins(job.method)
    if job.engine is not None and job.engine not in ENGINES:
        found |= plugins.required_modules("engine", job.engine)
    choices = training_choices.select_choices(methods.load(job.method).params, job.params)
    for kind, name in training_choices.list_plugins(choices):
        found |= plugins.required_modules(kind, name, training_choices.OURS[kind])
    told = made.meta.get("plugins")
    return dict(sorted({**found, **(told if isinstance(told, Mapping) else {})}.items()))


def require_matching_bundle(job: settings.JobSettings, made: Bundle) -> None:
    """Raise JobError if a bundle was visibly prepared for another job.

    The check compares the network of [model], its input, the names of [[donors]], and the labels. A key that the job
    leaves out matches any value.
    """
    known = dict(made.meta.get("network", {}))
    into = made.meta.get("input") or known.pop("input", None) or {}
    network = {key: value for key, value in job.model.items() if key not in ("input", *settings.NOT_NETWORK)}
    wanted = job.input or job.model.get("input") or {}
    odd = [
        *(["[model]"] if network and network != {key: known[key] for key in known if key != "input"} else []),
        *(
            ["[input]"]
            if any(_lists_from_tuples(into.get(key)) != _lists_from_tuples(value) for key, value in wanted.items())
            else []
        ),
    ]
    if job.donors:
        names = [donor.get("name") for donor in job.donors]
        odd += ["[[donors]]"] if names != list(made.meta.get("donors", {})) else []
    if job.labels and "labels" in made.meta:
        odd += _describe_label_mismatch(job.labels, made.meta["labels"])
    if odd:
        raise JobError(
            f"the bundle was prepared from another job than this ({' and '.join(odd)} differ): "
            "make it anew with `fedquilt prepare`"
        )


def _describe_label_mismatch(wanted: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return a list with a text on the first label that differs, or an empty list."""
    for number, (ours, theirs) in enumerate(itertools.zip_longest(wanted, given)):
        if ours != theirs:
            told = ["none" if each is None else repr(each) for each in (ours, theirs)]
            return [f"labels (label {number} is {told[0]} in the job and {told[1]} in the bundle)"]
    return []


def _lists_from_tuples(value: Any) -> Any:
    # JSON turns tuples into lists
    return [_lists_from_tuples(each) for each in value] if isinstance(value, list | tuple) else value
