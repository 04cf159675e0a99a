"""A board's folder of models, for tests of what is done with it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linear_models import network
from one_agent import Board, ScriptedWorker
from toy_kinds import release
from waiting import wait_until

from fedquilt.core import BlobRef
from fedquilt.edge_agent.releases.models import ModelReleases
from fedquilt.edge_agent.settings import AgentSettings, ModelSettings
from fedquilt.wire import DesiredRelease


class Place:
    """A board's models, on time that the test moves on."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.now_s, self.blobs = 100.0, root / "blobs"
        self.blobs.mkdir()
        self.settings = AgentSettings(device="d", home=str(root / "d"), models=ModelSettings(**settings))
        self.checks, self.board = ScriptedWorker(), Board()
        self.models = ModelReleases(self.settings, self.board, self.checks, clock=lambda: self.now_s)
        self.folder = self.models.folder

    def release(self, serial: int, payload: bytes | None = None) -> tuple[DesiredRelease, Path]:
        payload = network(gain=serial) if payload is None else payload
        sha256 = hashlib.sha256(payload).hexdigest()
        (self.blobs / sha256).write_bytes(payload)
        return release(serial, BlobRef(sha256=sha256, size=len(payload))), self.blobs / sha256

    def put(self, serial: int) -> DesiredRelease:
        """Bring a release into use."""
        release, blob = self.release(serial)
        self.models.stage(release, blob)
        self.models.activate(release)
        return release

    def served(self, **told: Any) -> None:
        values = {"at": time.time(), "model": self.models.current_sha256(), "served": 0, "failed": 0, "labelled": 0}
        (self.folder / "served.json").write_text(json.dumps({**values, **told}))

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder))


def short(wanted: DesiredRelease) -> str:
    assert wanted.blob is not None
    return wanted.blob.sha256[:16]


# -- the hook -------------------------------------------------------------------------------------


def told(place: Place, condition: Callable[[], bool] = lambda: True) -> str:
    """What is wrong once the hook has come to its end."""
    wait_until(lambda: place.models.is_settled() and condition(), "the hook's end")
    return place.models.unhealthy_reason()
