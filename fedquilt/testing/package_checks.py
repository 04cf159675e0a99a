"""Implementation of `fedquilt lab conformance`: checks of a method or of a package's plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fedquilt import methods, plugins
from fedquilt.core import FedquiltError, JobError
from fedquilt.data.readers import arrays as readers_plugin
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import devices, engines
from fedquilt.models.networks import registry
from fedquilt.testing import conformance

BUDGET_BYTES = 1 << 40


def check_package(name: str) -> Iterator[tuple[bool, str]]:
    """Check a method, or all plug-ins of an installed package.

    Yields:
        Whether a check has passed, and a line with the result.

    Raises:
        JobError: If there is no such method or package.
    """
    given = plugins.package_plugins(name)
    if not given:
        yield from _check_method(name)
        return
    ours = {"method": methods.builtin_names(), "network": registry.OURS, "engine": tuple(engines.NEEDS)}
    for plugin in given:
        try:
            plugins.find_plugin(plugin.kind, plugin.name, ours.get(plugin.kind, ()))
        except JobError as error:
            yield False, f"failed   {error}"
            continue
        if plugin.kind == "method":
            yield from _check_method(plugin.name)
        else:
            yield _check_plugin(plugin)


def _check_method(name: str) -> Iterator[tuple[bool, str]]:
    yield True, f"method {name}:"
    for words, how, why in conformance.run_checks(name):
        yield how != "failed", f"  {how:8} {words}" + (f": {why}" if why else "")


def _check_plugin(plugin: plugins.Plugin) -> tuple[bool, str]:
    """Import and try a plug-in. Return whether it works, and a line that states this."""
    tries: dict[str, Callable[[], object]] = {
        "network": lambda: registry.require_callable(plugin.name, plugins.import_plugin(plugin)),
        "data": lambda: [
            readers_plugin.open_plugin_data(DataSpec(dataset=plugin.name, split=split)) for split in ("train", "test")
        ],
        "meter": lambda: devices.create_meter(plugin.name).read(0.0),
        "engine": lambda: engines.create_engine(plugin.name, BUDGET_BYTES).close(),
    }
    try:
        tries[plugin.kind]()
    except FedquiltError as error:
        return False, f"failed   {error}"
    except Exception as error:  # code from outside may raise anything
        return False, f"failed   {plugin}: {type(error).__name__}: {error}"
    return True, f"passed   {plugin} is one"
