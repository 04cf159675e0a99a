"""Streams of labelled images to the devices' model runners, and their answers."""

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

from fedquilt.core import UNDECODABLE, Examples
from fedquilt.edge_agent import runner_status
from fedquilt.host import threads

BATCH: Final = 20  # images of one request
SLOW_S, FAST_S = 0.5, 0.01  # between two requests to every runner, at least
REQUEST_S: Final = 30.0
SAMPLE_S: Final = 1.0  # interval of reading the runners' status


class LabelReply(msgspec.Struct, frozen=True):
    """Classification of one image by a runner."""

    label: int = msgspec.field(name="class")


class ClassificationReply(msgspec.Struct, frozen=True):
    """Body of a runner's reply to one request."""

    model: str  # sha256
    answers: list[LabelReply]


class ResponseCounts(NamedTuple):
    at: float  # seconds since 1970
    device: str
    model: str  # sha256
    right: int  # by the labels
    given: int


class RunnerStatusSample(NamedTuple):
    """Status that a model runner wrote for its device's agent."""

    at: float  # seconds since 1970
    device: str
    model: str
    drift: float | None
    accuracy: float | None


class RequestStreams:
    """Sender of image requests to the model runners. Other threads may read its lists.

    Args:
        runners: URL of each device's runner.
        folders: Model folder of each device.
        images: Labelled images that are on no device.
        seed: Seed of the draws.
    """

    def __init__(
        self, runners: Mapping[str, str], folders: Mapping[str, Path], images: Examples, seed: int = 0
    ) -> None:
        self._runners, self._folders, self._images = dict(runners), dict(folders), images
        self._draws = {name: np.random.default_rng([seed, place]) for place, name in enumerate(runners)}
        self._links: dict[str, http.client.HTTPConnection] = {}
        self._pause_s = FAST_S
        self.answers: list[ResponseCounts] = []
        self.said: list[RunnerStatusSample] = []
        self.failed: list[str] = []  # why a request was not answered
        self._asked_s = self._sampled_s = -math.inf

    def set_pace(self, fast: bool) -> None:
        """Send requests as fast as the runners answer, or every SLOW_S seconds."""
        self._pause_s = FAST_S if fast else SLOW_S

    def set_images(self, images: Examples) -> None:
        self._images = images

    def latest_samples(self) -> dict[str, RunnerStatusSample]:
        """Return the last status of each runner by device."""
        return {said.device: said for said in list(self.said)}

    def count_answers(self, device: str, since: float) -> int:
        """Return the number of a device's answers since a time."""
        return sum(each.given for each in list(self.answers) if each.device == device and each.at >= since)

    @contextlib.contextmanager
    def send_in_background(self) -> Iterator[None]:
        """Send requests in a thread while the body runs."""
        try:
            with threads.call_in_background(self._send_due_requests, FAST_S, "stream"):
                yield
        finally:
            for link in self._links.values():
                link.close()

    def _send_due_requests(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._asked_s + self._pause_s:
            for device in self._runners:
                self._send_request(device)
            self._asked_s = time.monotonic()
        if now_s >= self._sampled_s + SAMPLE_S:
            self._sampled_s = now_s
            self._sample_runners()

    def _send_request(self, device: str) -> None:
        images = self._images
        chosen = self._draws[device].integers(0, len(images), BATCH)
        file, y = io.BytesIO(), images.y[chosen]
        np.savez(file, x=images.x[chosen], y=y)
        try:
            reply = self._post_images(device, file.getvalue())
            right = sum(each.label == truth for each, truth in zip(reply.answers, y.tolist(), strict=True))
        except (OSError, http.client.HTTPException, ValueError, *UNDECODABLE) as error:
            self._links.pop(device).close()
            self.failed.append(f"{device}: {error}")
            return
        self.answers.append(ResponseCounts(time.time(), device, reply.model, right, len(y)))

    def _post_images(self, device: str, body: bytes) -> ClassificationReply:
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
        return msgspec.json.decode(told, type=ClassificationReply)

    def _sample_runners(self) -> None:
        for device, folder in self._folders.items():
            with contextlib.suppress(OSError, *UNDECODABLE):
                told = msgspec.json.decode((folder / runner_status.FILE).read_bytes(), type=runner_status.RunnerStatus)
                said = RunnerStatusSample(told.at, device, told.model, told.drift, told.accuracy)
                if said != self.latest_samples().get(device):
                    self.said.append(said)


def find_address(log: Path) -> str | None:
    """Return the URL in a runner's log, or None until the runner has started."""
    words = log.read_text(errors="replace").split() if log.is_file() else []
    return next((word for word in words if word.startswith("http://")), None)
