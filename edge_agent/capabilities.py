"""Capabilities of a device, from its settings and the installed packages."""

from __future__ import annotations

from functools import cache

from msgspec.structs import replace

from fedquilt import methods, plugins
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.events import Capabilities
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task import sandbox
from fedquilt.formats import labels


def capabilities_from_settings(settings: AgentSettings, memory_bytes: int) -> Capabilities:
    """Return the capabilities and labels of a device with this much memory.

    Raises:
        JobError: If a size or a label in the settings is invalid.
    """
    installed = _installed_capabilities(settings.task_budget_bytes(memory_bytes), settings.plugins)
    return replace(installed, labels=labels.parse_labels(settings.labels))


@cache  # looked up on disk, and constant while a process runs
def _installed_capabilities(budget_bytes: int, allowed: tuple[str, ...] | None) -> Capabilities:
    with plugins.restrict_plugins_within(allowed):
        known = (*methods.builtin_names(), *methods.plugin_names(), *(name for name in allowed or () if ":" in name))
        found = plugins.plugin_fingerprints()
    return Capabilities(
        budget_bytes, engines.available_engines(), known, plugins=found, confined=sandbox.available_restrictions()
    )
