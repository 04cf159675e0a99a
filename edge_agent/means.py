"""What a device has for its tasks, by its settings and by what is installed."""

from __future__ import annotations

from functools import cache

from msgspec.structs import replace

from fedquilt import labels, methods, plugins
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.events import Means
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task import confine


def of(settings: AgentSettings, memory_bytes: int) -> Means:
    """Capabilities, labels and carriers of a board with so much memory.

    Raises:
        JobError: a size or a label in the settings that is none.
    """
    installed = _installed(settings.budget_bytes(memory_bytes), settings.plugins)
    return replace(installed, labels=labels.parse(settings.labels), carriers=settings.carriers)


@cache  # looked up on disk, and constant while a process runs
def _installed(budget_bytes: int, allowed: tuple[str, ...] | None) -> Means:
    """Engines and methods on this machine, as far as agent.toml allows those of other packages."""
    with plugins.restricted(allowed):
        known = (*methods.names(), *methods.outside(), *(name for name in allowed or () if ":" in name))
        found = plugins.modules()
    return Means(budget_bytes, engines.available(), known, plugins=found, confined=confine.possible())
