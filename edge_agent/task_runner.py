"""Task execution on one device: carries out the actions of the state machine.

Real agents and simulated fleets run the same code. An agent provides a link, a disk and a task process. A simulated
fleet provides virtual time and workers shared by many devices.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from fedquilt import wire
from fedquilt.core import BlobRef, Device, Reading, StoreError, Task, Update, WireError
from fedquilt.edge_agent import messages, state_machine
from fedquilt.edge_agent.engines import failures
from fedquilt.edge_agent.power.governor import GovernorPolicy
from fedquilt.edge_agent.power.learned_model import LearnedModel
from fedquilt.edge_agent.power.task_power import TaskPowerManager
from fedquilt.edge_agent.state_machine import (
    StartTask,
    TaskCompleted,
    TaskFailed,
    TaskPauseChanged,
    TaskReceived,
    TimerFired,
)
from fedquilt.edge_agent.task.protocol import DataLoaded, Event, WorkRequest, WorkResult
from fedquilt.edge_agent.task.worker import TaskWorker
from fedquilt.wire import Claim

log = logging.getLogger("fedquilt.agent")


class TaskServices(Protocol):
    """Services of the agent that a task runner needs.

    Raises, from every method:
        StoreError: If the device's disk is full or unusable. The task is then declined.
    """

    def publish_claim(self, claim: Claim) -> None: ...

    def submit_update(self, update: Update, now_s: float) -> None: ...

    def discard_update(self, update: Update) -> None: ...

    def fetch_blobs(self, refs: Sequence[BlobRef]) -> None: ...

    def cancel_fetch(self, sha256: str) -> None: ...

    def build_work_request(self, task: Task, budget_bytes: int, plan_bytes: int) -> WorkRequest: ...

    def commit_result(self, update: Update, blobs: Mapping[str, bytes], private: BlobRef | None) -> bool:
        """Store the current task's result durably. Return whether the result has private state."""
        ...

    def store_learned_costs(self, learned: Mapping[str, LearnedModel]) -> None: ...

    def report_progress(self, task: Task, fraction: float, now_s: float) -> None: ...


class TaskRunner:
    def __init__(
        self,
        device: str,
        state: state_machine.DeviceState,
        board: Device,
        worker: TaskWorker,
        governor_policy: GovernorPolicy,
        services: TaskServices,
    ) -> None:
        self.device, self.state = device, state
        self._board, self._worker, self._services = board, worker, services
        self._power_manager = TaskPowerManager(board, governor_policy)
        self._upload_reserve_s = 0.0  # time reserved for the upload of the current task's update

    def step(self, now_s: float) -> None:
        self._power_manager.read_due_sensors(now_s)
        for event in self._worker.poll_events(now_s):
            self._handle_worker_event(event, now_s)
        if now_s >= state_machine.next_due_s(self.state):
            self.handle_event(TimerFired(), now_s)

    def next_step_s(self, now_s: float) -> float:
        return min(
            state_machine.next_due_s(self.state), self._worker.next_poll_s(now_s), self._power_manager.next_sample_s()
        )

    def stop(self) -> None:
        self._worker.close()
        self._power_manager.stop()

    def handle_event(self, event: state_machine.Event, now_s: float) -> None:
        reading = self.read_sensors(now_s) if isinstance(event, TaskReceived) else Reading()
        self.state, actions = state_machine.advance(self.state, event, now_s, reading)
        self.carry_out_actions(actions, now_s)

    def fail_task(self, error: StoreError, now_s: float) -> None:
        self.handle_event(TaskFailed(failures.claim_code_from_error(error), failures.describe_error(error)), now_s)

    def carry_out_actions(self, actions: Sequence[state_machine.Action], now_s: float) -> None:
        """Carry out actions in order. A disk error skips the remaining actions and fails the task."""
        for action in actions:
            try:
                match action:  # the most frequent first
                    case state_machine.PublishClaim(claim):
                        self._services.publish_claim(claim)
                    case state_machine.FetchBlobs(refs):
                        self._services.fetch_blobs(refs)
                    case StartTask(task):
                        self._start_task(task, now_s)
                    case state_machine.SendUpdate(update):
                        self._services.submit_update(update, now_s)
                    case state_machine.StoreLearnedCosts(learned):
                        self._services.store_learned_costs(learned)
                    case state_machine.StopTask():
                        self._worker.kill()
                        self._power_manager.stop()
                    case state_machine.CancelFetch(sha256):
                        self._services.cancel_fetch(sha256)
                    case state_machine.DeleteUpdate(update):
                        self._services.discard_update(update)
            except StoreError as error:
                return self.fail_task(error, now_s)

    def apply_capabilities(self, capabilities: state_machine.Capabilities, governor_policy: GovernorPolicy) -> None:
        """Replace the capabilities for later tasks. The new governor policy applies at once."""
        capabilities = msgspec.structs.replace(capabilities, runs_on=self.state.capabilities.runs_on)
        self.state = msgspec.structs.replace(self.state, capabilities=capabilities)
        self._power_manager.governor_policy = governor_policy

    @property
    def is_task_running(self) -> bool:
        return self.state.open_task is not None and self.state.open_task.is_running

    def set_task_pause(self, is_paused: bool, now_s: float) -> None:
        """Pause or resume the start of tasks. A pause kills the idle worker to free memory."""
        if is_paused and not self.is_task_running:
            self._worker.kill()
        self.handle_event(TaskPauseChanged(is_paused), now_s)

    def read_sensors(self, now_s: float) -> Reading:
        """Return sensor readings in which the memory of an idle worker counts as available."""
        reading = self._board.read_sensors(now_s)
        if reading.available_bytes is None:
            return reading
        spare = reading.available_bytes + self._worker.resident_bytes
        return msgspec.structs.replace(reading, available_bytes=spare)

    def _start_task(self, task: Task, now_s: float) -> None:
        request = self._services.build_work_request(
            task, self.state.capabilities.budget_bytes, state_machine.plan_limit_bytes(self.state, task)
        )
        self._upload_reserve_s = state_machine.upload_reserve_s(self.state, now_s)
        self._power_manager.start_task(now_s)
        self._worker.start(request, now_s)

    def _handle_worker_event(self, event: Event, now_s: float) -> None:
        open_task = self.state.open_task
        if open_task is None or not open_task.is_running:
            return
        if isinstance(event, WorkResult):
            return self._record_task_result(open_task, event, now_s)
        if isinstance(event, DataLoaded):
            learned_model = self.state.learned_models.get(state_machine.workload_key(open_task.task), LearnedModel())
            finish_s = open_task.due_s - self._upload_reserve_s
            return self._power_manager.start_work(
                open_task.task.work.total_for_examples(event.examples), finish_s, learned_model, now_s
            )
        self._power_manager.report_progress(event.fraction, now_s)
        self._services.report_progress(open_task.task, event.fraction, now_s)

    def _record_task_result(self, open_task: state_machine.OpenTask, outcome: WorkResult, now_s: float) -> None:
        capabilities = self.state.capabilities
        if outcome.runs_on not in ("", capabilities.runs_on.get(open_task.task.engine)):
            runs_on = {**capabilities.runs_on, open_task.task.engine: outcome.runs_on}
            self.state = msgspec.structs.replace(
                self.state, capabilities=msgspec.structs.replace(capabilities, runs_on=runs_on)
            )
        if outcome.code != "ok":
            self._power_manager.stop()
            if outcome.killed_externally:
                log.warning("%s, round %d: %s", open_task.task.job, open_task.task.round + 1, outcome.reason)
            return self.handle_event(
                TaskFailed(
                    outcome.code,
                    outcome.reason,
                    outcome.ran_out_of_memory,
                    outcome.base_bytes,
                    killed_externally=outcome.killed_externally,
                ),
                now_s,
            )
        task_cost = self._power_manager.end_task(
            open_task.task.work.total_for_examples(outcome.examples), outcome.wall_s, now_s
        )
        update = messages.update_message(self.device, open_task, outcome, task_cost.cost)
        try:
            wire.decode(wire.encode(update), Update)
            private = self._services.commit_result(update, outcome.blobs, outcome.private)
        except WireError as error:
            reason = f"method {open_task.task.method!r} returned an update that cannot be sent: {error}"
            return self.handle_event(TaskFailed("exception", reason), now_s)
        except StoreError as error:
            return self.fail_task(error, now_s)
        return self.handle_event(TaskCompleted(update, private, task_cost.learned_model, outcome.planned_bytes), now_s)
