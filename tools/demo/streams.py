"""Model runners of boards as processes, and the stream of labelled images that each of them answers."""

from __future__ import annotations

import contextlib
import http.client
import io
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np

from fedquilt import threads
from fedquilt.core import UNDECODABLE, Examples
from fedquilt.edge_agent import served

BATCH: Final = 20  # images of one request
SLOW_S, FAST_S = 0.5, 0.01  # between two requests to every runner, at least
REQUEST_S: Final = 30.0
SAMPLE_S: Final = 1.0  # between two looks at what runners say of themselves


class Label(msgspec.Struct, frozen=True):
    """Classification of one image by a runner."""

    label: int = msgspec.field(name="class")


class Reply(msgspec.Struct, frozen=True):
    """Body of a runner's reply to one request."""

    model: str  # sha256
    answers: list[Label]


class Answers(NamedTuple):
    """Answers to one request."""

    at: float  # seconds since 1970
    device: str
    model: str  # sha256
    right: int  # by the labels
    given: int


class Said(NamedTuple):
    """What a runner wrote for its board's agent."""

    at: float  # seconds since 1970
    device: str
    model: str
    drift: float | None
    accuracy: float | None


class Streams:
    """Asks the runners, in turn, until it is stopped. What it has noted may be read by another thread.

    Args:
        runners: the URL of each device's runner.
        folders: each device's folder of models.
        images: that are asked, labelled; no board has them to learn from.
        seed: of the draws.
    """

    def __init__(
        self, runners: Mapping[str, str], folders: Mapping[str, Path], images: Examples, seed: int = 0
    ) -> None:
        self._runners, self._folders, self._images = dict(runners), dict(folders), images
        self._draws = {name: np.random.default_rng([seed, place]) for place, name in enumerate(runners)}
        self._links: dict[str, http.client.HTTPConnection] = {}
        self._pause_s = FAST_S
        self.answers: list[Answers] = []
        self.said: list[Said] = []
        self.failed: list[str] = []  # why a request was not answered
        self._asked_s = self._sampled_s = -math.inf

    def pace(self, fast: bool) -> None:
        """Ask as often as runners can, or at leisure."""
        self._pause_s = FAST_S if fast else SLOW_S

    def show(self, images: Examples) -> None:
        """Ask these images from now on."""
        self._images = images

    def latest(self) -> dict[str, Said]:
        """What each runner wrote last."""
        return {said.device: said for said in list(self.said)}

    def count(self, device: str, since: float) -> int:
        """Answers of a device's runner since a time."""
        return sum(each.given for each in list(self.answers) if each.device == device and each.at >= since)

    @contextlib.contextmanager
    def flowing(self) -> Iterator[None]:
        """Ask in a thread of its own while the body runs."""
        try:
            with threads.repeating(self._round, FAST_S, "stream"):
                yield
        finally:
            for link in self._links.values():
                link.close()

    def _round(self) -> None:
        """Ask every runner, and look at what each says of itself, as far as they are due."""
        now_s = time.monotonic()
        if now_s >= self._asked_s + self._pause_s:
            for device in self._runners:
                self._ask(device)
            self._asked_s = time.monotonic()
        if now_s >= self._sampled_s + SAMPLE_S:
            self._sampled_s = now_s
            self._sample()

    def _ask(self, device: str) -> None:
        images = self._images
        chosen = self._draws[device].integers(0, len(images), BATCH)
        file, y = io.BytesIO(), images.y[chosen]
        np.savez(file, x=images.x[chosen], y=y)
        try:
            reply = self._post(device, file.getvalue())
            right = sum(each.label == truth for each, truth in zip(reply.answers, y.tolist(), strict=True))
        except (OSError, http.client.HTTPException, ValueError, *UNDECODABLE) as error:
            self._links.pop(device).close()
            self.failed.append(f"{device}: {error}")
            return
        self.answers.append(Answers(time.time(), device, reply.model, right, len(y)))

    def _post(self, device: str, body: bytes) -> Reply:
        address = urlsplit(self._runners[device])
        if device not in self._links:
            self._links[device] = http.client.HTTPConnection(
                address.hostname or "", address.port or 0, timeout=REQUEST_S
            )
        link = self._links[device]
        link.request("POST", "/v1/classify", body)
        answer = link.getresponse()
        told = answer.read()
        if answer.status != http.client.OK:
            raise ValueError(f"{answer.status} {told[:200]!r}")
        return msgspec.json.decode(told, type=Reply)

    def _sample(self) -> None:
        for device, folder in self._folders.items():
            with contextlib.suppress(OSError, *UNDECODABLE):
                told = msgspec.json.decode((folder / served.FILE).read_bytes(), type=served.Served)
                said = Said(told.at, device, told.model, told.drift, told.accuracy)
                if said != self.latest().get(device):
                    self.said.append(said)


def address(log: Path) -> str | None:
    """The URL that a runner has printed; None: it does not answer yet."""
    words = log.read_text(errors="replace").split() if log.is_file() else []
    return next((word for word in words if word.startswith("http://")), None)
