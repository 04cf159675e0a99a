"""Credentials that systemd passes to the agent's unit, see LoadCredential in systemd.exec(5)."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from fedquilt.core import JobError
from fedquilt.edge_agent.settings import AgentSettings

FILES = ("ca", "cert", "key", "password_file")


def apply_systemd_credentials(settings: AgentSettings, folder: Path | None) -> AgentSettings:
    """Return settings that read each broker file from `folder`, if the folder has a copy.

    agent.toml can then name a key that only root may read, while the unit's user reads the copy.
    """
    if folder is None:
        return settings
    named = {key: getattr(settings.broker, key) for key in FILES}
    found: dict[str, str] = {}
    for key, path in named.items():
        if path is None or not os.path.isfile(copy := str(folder / Path(path).name)):
            continue
        for other in [other for other, taken in found.items() if taken == copy and named[other] != path]:
            raise JobError(
                f"broker.{other} {named[other]} and broker.{key} {path} have the same name, and one credential cannot "
                "be both: rename one of the files"
            )
        found[key] = copy
    return msgspec.structs.replace(settings, broker=msgspec.structs.replace(settings.broker, **found))
