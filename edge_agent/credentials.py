"""Credentials that systemd passes to the agent alone: LoadCredential (systemd.exec(5))."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from fedquilt.edge_agent.settings import AgentSettings

FILES = ("ca", "cert", "key", "password_file")


def taken(settings: AgentSettings, folder: Path | None) -> AgentSettings:
    """Settings in which each broker file that `folder` has under its name is read from there.

    So agent.toml names /etc/fedquilt/device.key, which only root reads, and the unit's user reads its copy.
    """
    if folder is None:
        return settings
    named = {key: getattr(settings.broker, key) for key in FILES}
    found = {key: str(folder / Path(path).name) for key, path in named.items() if path is not None}
    found = {key: path for key, path in found.items() if os.path.isfile(path)}
    return msgspec.structs.replace(settings, broker=msgspec.structs.replace(settings.broker, **found))
