"""Rails from jetson-stats, for a Jetson whose own files show none (containers, new boards).

jetson-stats is AGPL-3.0 and a separate daemon. The package is no dependency: it is imported only if installed and
needed, and used through its public client only. Install it with `pip install fedquilt[jetson]`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from fedquilt.core import Covers, Power

log = logging.getLogger("fedquilt.devices")


def connect_jtop(load: Callable[[str], Any] = importlib.import_module) -> JtopMeter | None:
    """Return a meter that follows the jtop service, or None if it does not run.

    Args:
        load: Function that imports a module by its name.
    """
    try:
        client = load("jtop").jtop()
        client.start()
    except ImportError:
        return None
    except Exception as error:  # its own exceptions have no base that can be named without importing it
        log.warning("no power is read: the jtop service does not answer (%s)", error)
        return None
    return JtopMeter(client)


class JtopMeter:
    """Latest readings of a running `jtop` client, as a `fedquilt.core.Meter`.

    Readings are instantaneous milliwatts. The "averages" of jtop are not averages and not used.
    """

    covers: Covers = "board"

    def __init__(self, client: Any) -> None:
        self._client = client

    def read(self, now_s: float) -> Power:
        try:
            if not self._client.ok(spin=True):
                return Power()
            told = self._client.power
            rails_w = {str(label): float(rail["power"]) / 1000 for label, rail in told["rail"].items()}
            total_w = float(told["tot"]["power"]) / 1000
            name = told["tot"].get("name")
        except Exception as error:  # as above, or values of another shape than this version's
            log.debug("jtop tells no power: %s", error)
            return Power()
        if not rails_w and name is None:
            return Power()  # the total of no rails would be 0
        if name is not None:
            rails_w = {str(name): total_w, **rails_w}
        return Power(total_w, f"jtop {name or 'sum of ' + ', '.join(rails_w)}", rails_w)

    def close(self) -> None:
        self._client.close()
