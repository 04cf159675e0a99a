"""`fedquilt conformance`: the checks on one method, or on everything that an installed package offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fedquilt import methods, plugins
from fedquilt.core import FedquiltError, JobError
from fedquilt.data.readers import outside
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import devices, engines
from fedquilt.models.networks import registry
from fedquilt.testing import conformance

BUDGET_BYTES = 1 << 40


def lines(name: str) -> Iterator[tuple[bool, str]]:
    """Check a method by its name or `module:name`, or everything in a package's entry points.

    Yields:
        Whether it is correct, and a line that says so.

    Raises:
        JobError: there is no such method or package.
    """
    given = plugins.of_package(name)
    if not given:
        yield from _method(name)
        return
    ours = {"method": methods.names(), "network": registry.OURS, "engine": tuple(engines.NEEDS)}
    for plugin in given:
        try:
            plugins.find(plugin.kind, plugin.name, ours.get(plugin.kind, ()))
        except JobError as error:
            yield False, f"failed   {error}"
            continue
        if plugin.kind == "method":
            yield from _method(plugin.name)
        else:
            yield _loads(plugin)


def _method(name: str) -> Iterator[tuple[bool, str]]:
    yield True, f"method {name}:"
    for words, how, why in conformance.run(name):
        yield how != "failed", f"  {how:8} {words}" + (f": {why}" if why else "")


def _loads(plugin: plugins.Plugin) -> tuple[bool, str]:
    """Check a plug-in that is no method, as far as possible without a job: that it is of its kind."""
    tries: dict[str, Callable[[], object]] = {
        "network": lambda: registry.require_callable(plugin.name, plugins.imported(plugin)),
        "data": lambda: [outside.open_(DataSpec(dataset=plugin.name, split=split)) for split in ("train", "test")],
        "meter": lambda: devices.meter(plugin.name).read(0.0),
        "engine": lambda: engines.make(plugin.name, BUDGET_BYTES).close(),
    }
    try:
        tries[plugin.kind]()
    except FedquiltError as error:
        return False, f"failed   {error}"
    except Exception as error:  # code from outside may raise anything
        return False, f"failed   {plugin}: {type(error).__name__}: {error}"
    return True, f"passed   {plugin} is one"
