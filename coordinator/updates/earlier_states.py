"""States of earlier rounds, on which devices still work in buffered mode."""

from __future__ import annotations

from typing import Any

from fedquilt.coordinator.rounds.job_state import JobState, TaskVersion
from fedquilt.coordinator.updates.job_blobs import ModelStates
from fedquilt.core import BlobRef, DeviceUpdate, DeviceView, Method, TaskSpec


class EarlierStates:
    """Earlier states of a job, of which the one that was used last stays in memory."""

    def __init__(self, method: Method, model_states: ModelStates) -> None:
        self._method, self._model_states = method, model_states
        self._latest: tuple[BlobRef | None, Any] = (None, None)

    def make_task_spec(self, version: TaskVersion, view: DeviceView) -> TaskSpec | None:
        return self._method.send(self._load_state(version), view)

    def rebase_update(self, update: DeviceUpdate, state: Any, job_state: JobState) -> DeviceUpdate:
        """Return an update of an earlier state as one of the present state, or any other update unchanged.

        Raises:
            UpdateError: If the update is invalid in its own state.
        """
        version, rebase = job_state.earlier_versions.get(update.device), self._method.aggregation.rebase
        if version is None or rebase is None:
            return update
        earlier_state = self._load_state(version)
        self._method.aggregation.require_valid_update(earlier_state, update)
        weight = job_state.constants.cohort.staleness.weight(job_state.round - version.round)
        return rebase(state, earlier_state, update, weight)

    def _load_state(self, version: TaskVersion) -> Any:
        assert version.state is not None
        if self._latest[0] != version.state:
            state = self._model_states.load_state(version.state, version.round, can_recreate=not version.round)
            self._latest = version.state, state
        return self._latest[1]
