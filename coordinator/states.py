"""States of one job in the depot: the first one, made of the bundle, and those that rounds have left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedquilt import tensors
from fedquilt.blobs.store import Depot
from fedquilt.coordinator import encoding, mending, summing
from fedquilt.coordinator.encoding import Encoded
from fedquilt.coordinator.facts import Rounds
from fedquilt.coordinator.preflight import first_state
from fedquilt.coordinator.settings import Job
from fedquilt.core import BlobRef, Bundle, Method


class Opened(NamedTuple):
    """What a job that is taken up goes on from."""

    ref: BlobRef
    state: Any  # as it is stored
    settles: bool  # whether the method has settling rounds, for a new job
    encoded: Encoded  # what all devices are sent of the state


class States:
    """States of one job; a worker may use it while the loop does not.

    Args:
        run: id of the job.
        job: settings.
        method: of the job.
        bundle: of the job.
        folder: with the bundle.
        depot: where states are, and the bundle's files for devices.
        lazy_bytes: tensors of as many bytes stay on the disk.

    Raises, from every method:
        JobError, ModelError: the bundle cannot be run as written, or the state is lost.
        UnreadableError: the disk fails where the bundle or the state is read.
        StoreError: the depot cannot be written.
    """

    def __init__(
        self, run: str, job: Job, method: Method, bundle: Bundle, folder: Path, depot: Depot, lazy_bytes: float
    ) -> None:
        self._run, self._job, self._method, self._depot, self._lazy_bytes = run, job, method, depot, lazy_bytes
        self._bundle, self._folder = bundle, folder

    def opened(self, rounds: Rounds) -> Opened:
        """Store what is missing of the bundle, and read the state of these rounds; of a new job it is made first."""
        self.restore(self._bundle.files)
        ref = rounds.state or summing.stored(self._depot, *tensors.parts(self._first()))
        state = self.load(ref, rounds.round, again=not rounds.round)  # what is stored, also of a new job
        settles = self._method.settle is not None and self._method.settle.wanted(state)
        return Opened(ref, state, settles, encoding.encoded(self._method, state, ref, self._depot))

    def load(self, ref: BlobRef, round: int, *, again: bool) -> Any:
        """A stored state.

        Args:
            ref: of the state.
            round: that begins with it, or ends with it; before round 1 it may be made anew from the bundle.
            again: whether what it follows from is here, so that it can be stored anew.
        """

        def anew() -> Any:
            return None if round else self._first()

        return mending.state(self._run, self._depot, ref, self._method.state, anew, self._lazy_bytes, again=again)

    def restore(self, files: Mapping[str, BlobRef]) -> None:
        """Store those files of the bundle that the depot lacks."""
        mending.restore(self._run, self._depot, self._folder, files)

    def _first(self) -> Any:
        with mending.of_bundle(self._run, self._folder):
            return first_state(self._job, self._bundle, self._method)
