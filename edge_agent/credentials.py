"""Credentials that systemd passes to the agent alone: LoadCredential (systemd.exec(5))."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from fedquilt.core import JobError
from fedquilt.edge_agent.settings import AgentSettings

FILES = ("ca", "cert", "key", "password_file")


def taken(settings: AgentSettings, folder: Path | None) -> AgentSettings:
    """Settings in which each broker file that `folder` has under its name is read from there.

    So agent.toml names /etc/fedquilt/device.key, which only root reads, and the unit's user reads its copy.

    Raises:
        JobError: If two different files have the name of one credential.
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
