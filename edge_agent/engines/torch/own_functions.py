"""Losses and transforms of plug-ins: functions that take the arguments in [params]."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from fedquilt import plugins
from fedquilt.core import JobError
from fedquilt.formats import training_choices


def load_function(
    kind: Literal["loss", "transform"], name: str, arguments: Mapping[str, Any], values: int
) -> Callable[..., Any]:
    """Return the function of a plug-in, which takes `values` values and the arguments.

    Raises:
        JobError: If there is no such function, or it does not take them.
    """
    plugin = plugins.find_plugin(kind, name, training_choices.OURS[kind])
    assert plugin is not None
    function: Callable[..., Any] = plugins.import_plugin(plugin)
    if not callable(function):
        raise plugins.wrong_kind_error(plugin, "a function", function)
    require_arguments(f"[params] {kind} {name!r}", function, values, arguments)
    return function


def require_arguments(where: str, function: Callable[..., Any], values: int, arguments: Mapping[str, Any]) -> None:
    """Raise JobError unless a function takes `values` values and the arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * values, **arguments)
    except TypeError as error:
        raise JobError(f"{where}: {error}; its arguments are {', '.join(signature.parameters)}") from None
