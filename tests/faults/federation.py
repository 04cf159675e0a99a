"""Simulation of one schedule, and the invariants that must hold afterwards."""

from __future__ import annotations

import hashlib
import heapq
import logging
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

from fedquilt import wire
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    JobEnded,
    RoundCommitted,
    TaskDeclined,
    UpdateAccepted,
    UpdateLost,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import DeviceUpdate, FedquiltError, Method, Task, Update
from fedquilt.edge_agent.agent_state import UPDATE_FILE, JobRecords, PrivateState
from tests.faults import log_checks, schedule
from tests.faults.broker import DeliveryNoise, SimBroker
from tests.faults.disk import SimDisk, SimulatedFileSystem
from tests.faults.log_checks import AttemptCheck
from tests.faults.processes import (
    FLEET,
    AgentProcess,
    CoordinatorProcess,
    InvariantError,
    SimulatedProcess,
    last_counted_rounds,
)
from tests.faults.reference import Cohorts, Contribution, ReferenceClient, ReferenceRun, ReferenceState
from tests.faults.schedule import COORDINATOR, ROUND_S, FaultSchedule

STEPS_MOST: Final = 2_000
SETTLE_S: Final = 120.0  # virtual, for answers to the last updates
REPLY_S: Final = 5.0  # virtual, for messages that follow when a device connects
RECOVERY_S: Final = 150.0  # virtual, until all that a fault has destroyed is sent again: see `finish_s`

SLACK_S: Final = 1.0  # virtual, until a coordinator that polls notices that an attempt is over
UNTIMED: Final = (schedule.BrokerRestart, schedule.JobStop, schedule.BitRot, schedule.HomeRestore)
UNTIMED_THERE: Final = (schedule.ConnectionLoss, schedule.ClockJump, schedule.DiskFault)
"""Faults, and faults of the coordinator, by which a deadline is earlier or later than on the simulation's clock."""

Observe = Callable[[str, AnyEvent], None]
S = TypeVar("S", bound=SimulatedProcess)


class ScheduleEnvironment:
    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self.place = Path(tempfile.mkdtemp(prefix="fedquilt-sim-", dir=shared if shared.is_dir() else None))
        self.rounds = 0
        self._shops: dict[str, ReferenceClient] = {}
        self.empty = self._empty_database()

    def __enter__(self) -> ScheduleEnvironment:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def reference_runs(self, plan: FaultSchedule) -> dict[str, ReferenceRun]:
        plans = [plan.for_job(number) for number in range(plan.jobs)]
        for name in {each.method for each in plans} - self._shops.keys():
            self._shops[name] = ReferenceClient(name, self.place)
        return {
            _job_id(number): ReferenceRun(each, self._shops[each.method], number) for number, each in enumerate(plans)
        }

    def _empty_database(self) -> bytes:
        with Store(self.place / "home"):
            pass
        return (self.place / "home" / "fedquilt.db").read_bytes()

    def run_plan(self, plan: FaultSchedule, observe: Observe = lambda job, fact: None) -> Counter[str]:
        """Run a schedule and return the counts of all events.

        Raises:
            InvariantError: If an invariant is violated.
        """
        folder = Path(tempfile.mkdtemp(dir=self.place))
        world = SimulatedFederation(plan, self, folder, observe)
        try:
            with capture_log(world.happened):
                world.run()
            if world.happened["damaged"] and not world.happened["rot"]:
                raise InvariantError("a blob was whole before anybody saw that a chunk of it was not")
            world.require_correct()
        except InvariantError:
            raise
        except FedquiltError as error:
            raise InvariantError(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            raise InvariantError(f"an error without a name: {type(error).__name__}: {error}") from error
        finally:
            self.rounds += world.committed
            world.close()
            shutil.rmtree(folder)
        return world.happened


class LogCapture(logging.Handler):
    def __init__(self, happened: Counter[str]) -> None:
        super().__init__(logging.WARNING)
        self._happened = happened

    def emit(self, record: logging.LogRecord) -> None:
        if "could not be fetched" in str(record.msg) and "arrived with other content" in record.getMessage():
            self._happened["damaged"] += 1


@contextmanager
def capture_log(happened: Counter[str]) -> Iterator[None]:
    log, ear = logging.getLogger("fedquilt"), LogCapture(happened)
    log.addHandler(ear)
    try:
        yield
    finally:
        log.removeHandler(ear)


def _job_id(number: int) -> str:
    return f"sim{number}-20260101-000000-00000{number}"


def _rounds_in_outbox(disk: SimDisk, root: str, id: str) -> set[int]:
    if not disk.is_dir(f"{root}/outbox"):
        return set()
    files = [f"{root}/outbox/{each.name}/{UPDATE_FILE}" for each in disk.entries(f"{root}/outbox")]
    updates = [wire.decode(disk.read(file), Update) for file in files if disk.is_file(file)]
    return {update.round for update in updates if update.job == id}


class SimulatedFederation:
    def __init__(self, plan: FaultSchedule, environment: ScheduleEnvironment, folder: Path, observe: Observe) -> None:
        self.plan, self.happened = plan, Counter[str]()
        self.truths = environment.reference_runs(plan)
        self.committed = 0
        self._observe = observe
        noise = [
            DeliveryNoise(
                each.start_s, each.start_s + each.length_s, each.drop, each.duplicate, each.corrupt, each.delay_s
            )
            for each in plan.faults
            if isinstance(each, schedule.NetworkNoise)
        ]
        self.happened["noise"] += len(noise)
        self.broker = SimBroker(plan.seed, noise, plan.payload)
        self._ended: dict[str, JobEnded] = {}
        self._wall_ns = dict.fromkeys([COORDINATOR], 0)
        self._began_ns = time.time_ns()
        self.coordinator = self._make_side(CoordinatorProcess, COORDINATOR, folder)
        self.coordinator.observe, self.coordinator.load = self._check_event, self._method_with_fold_check
        self.coordinator.acknowledge, self.coordinator.begin = self._count_acknowledgement, self._extend_attempt_limits
        slack_s = SLACK_S + 4 * plan.devices * max(plan.beside_s, 0.0)
        self._attempts = {id: AttemptCheck(plan.deadline_s, slack_s) for id in self.truths}
        # updates that come in turn put a deadline off by their wait, which takes long where devices refuse to send
        in_turn = (schedule.NewerCoordinator,) if plan.beside_s >= 0 else ()
        self._timed = not any(
            isinstance(each, (*UNTIMED, *in_turn)) or (isinstance(each, UNTIMED_THERE) and each.who == COORDINATOR)
            for each in plan.faults
        )
        self.coordinator.platter.open_database(f"/{COORDINATOR}/fedquilt.db").write_file(environment.empty)
        by_method = {truth.job.method: truth for truth in self.truths.values()}
        self.agents: list[AgentProcess] = []
        for index in range(plan.devices):
            agent = self._make_side(AgentProcess, f"dev-{index}", folder)
            agent.truths = by_method
            agent.counts = partial(self._is_counted, agent.name)
            self.agents.append(agent)
        self.sides: list[SimulatedProcess] = [self.coordinator, *self.agents]
        self._due_times: list[tuple[float, int, Callable[[], None]]] = []
        self._last_s = 0.0  # virtual time at which the coordinator was last seen to run
        self._entered = 0  # entries of the agenda so far
        self._trouble_s = 0.0  # virtual time of the last fault so far, or of a job's submission
        self._restores = sum(isinstance(fault, schedule.HomeRestore) for fault in plan.faults)  # to come
        self._deaths = Counter[str]()  # device -> acknowledgements until it dies
        # jobs first: a home that is copied before its job is submitted has none to finish
        for number, id in enumerate(self.truths):
            self._schedule(max(plan.twice_s, 0.0) if number else 0.0, "", partial(self._submit_job, id))
        for fault in plan.faults:
            self._schedule_fault(fault)

    def _make_side(self, kind: type[S], name: str, folder: Path) -> S:
        self._wall_ns[name] = 0
        platter = SimulatedFileSystem(
            f"/{name}", folder, lambda: self._began_ns + self._wall_ns[name] + int(self.broker.now_s * 1e9)
        )
        return kind(name, self.broker, platter, self.plan, self.happened)

    def run(self) -> None:
        self._play_until(
            lambda: not self._restores and (len(self._ended) == len(self.truths) or self._all_jobs_ended())
        )
        self.broker.noise = ()
        for side in self.agents:
            self.broker.disconnect_client(side.name, keep=False)
            self.broker.reconnect_client(side.name)
        connected_s = self.broker.now_s
        self._play_until(lambda: self.broker.now_s >= connected_s + REPLY_S)

    def _play_until(self, over: Callable[[], bool]) -> None:
        broker, steps, until_s = self.broker, 0, math.inf
        while True:
            now_s = broker.now_s
            while self._due_times and self._due_times[0][0] <= now_s:
                heapq.heappop(self._due_times)[2]()
            broker.deliver_due()
            for side in self.sides:
                if side.due_s <= now_s or (side.name in broker.woken and now_s >= side.up_s):
                    broker.woken.discard(side.name)
                    before = side.trouble
                    side.step(now_s)
                    steps += 1
                    if side.trouble != before:
                        self._trouble_s = max(self._trouble_s, now_s, side.up_s)
                    if side.ended and isinstance(side, AgentProcess):
                        self._require_update_or_ack(side)
                    side.ended = False
            if self.coordinator.inner is not None:
                self._last_s = now_s
            if over():
                if until_s == math.inf:
                    until_s = now_s + SETTLE_S
                if self._no_update_waits() or now_s > until_s:
                    return
            elif (now_s > self._trouble_s + self.finish_s and not self._due_times) or steps > STEPS_MOST:
                late_s, limit_s = now_s - self._trouble_s, self.finish_s
                raise InvariantError(
                    f"the jobs do not end: virtual second {now_s:.0f}, {late_s:.0f} s after the last fault, "
                    f"{limit_s:.0f} s allowed, {steps} steps"
                )
            next_s = min([broker.next_due_s(), *(side.due_s for side in self.sides)])
            if self._due_times:
                next_s = min(next_s, self._due_times[0][0])
            broker.now_s = max(now_s, next_s)

    @property
    def finish_s(self) -> float:
        plan = self.plan
        slowest_s = max(side.work_s for side in self.agents)
        rounds = plan.jobs * (plan.rounds + 1)
        finish_s = RECOVERY_S + rounds * plan.jobs * (slowest_s + ROUND_S + 3 * max(plan.beside_s, 0.0))
        if plan.requires_all_devices:
            return finish_s
        useless = sum(side.dead or side.work_s >= plan.deadline_s or side.newer for side in self.agents)
        return finish_s + (rounds * useless + 2) * plan.deadline_s

    def _submit_job(self, id: str) -> None:
        with self._open_operator_store() as store:
            store.add_job(self.truths[id].job, self.truths[id].folder, id=id)

    def _is_counted(self, device: str, job: str, round: int) -> bool:
        return job in self.coordinator.promises and (round, device) in self.coordinator.promises[job].counted

    def _count_acknowledgement(self, device: str) -> None:
        self._deaths[device] -= 1
        if self._deaths[device] == 0:
            self._schedule(
                self.broker.now_s, "death", next(side for side in self.agents if side.name == device).destroy
            )

    def _all_jobs_ended(self) -> bool:
        inner = self.coordinator.inner
        if inner is None or inner.active_jobs() or self._due_times:
            return False
        with self._open_operator_store() as store:
            return all(store.stored_status(id) in ("done", "failed") for id in self.truths)

    def _no_update_waits(self) -> bool:
        return all(
            side.dead or (side.inner is not None and not side.inner.task_runner.state.outbox) for side in self.agents
        )

    def _check_event(self, job: object, fact: AnyEvent) -> None:
        id: str = job.id  # type: ignore[attr-defined]
        self.committed += isinstance(fact, RoundCommitted)
        if isinstance(fact, JobEnded) and fact.status != "stopped":
            self._ended[id] = fact
        wrong = self._attempts[id].check_event(fact, self.broker.now_s)
        if wrong and self._timed:
            raise InvariantError(f"{id}: {wrong}")
        self._observe(id, fact)

    def _extend_attempt_limits(self) -> None:
        for each in self._attempts.values():
            each.extend_for_restart(self.broker.now_s, self.broker.now_s - self._last_s)

    def _method_with_fold_check(self, name: str) -> Method:
        method = next(truth.method for truth in self.truths.values() if truth.job.method == name)
        folded: dict[int, tuple[frozenset[str], Any]] = {}  # by the identity of a sum, which is held here

        def fold(state: Any, total: Any, given: DeviceUpdate) -> Any:
            before = folded.get(id(total), (frozenset(), None))[0]
            any_order = method.aggregation.accumulator(state) is not None
            if given.device in before or (not any_order and max(before, default="") > given.device):
                last = max(before)
                raise InvariantError(f"{given.device}'s update was folded after {last}'s, in round {given.round}")
            found = method.aggregation.fold(state, total, given)
            if found is not None and not isinstance(found, int | float | str | tuple):  # equal ones may be the same
                folded[id(found)] = (before | {given.device}, found)
            return found

        return replace(method, aggregation=replace(method.aggregation, fold=fold))

    def _schedule_fault(self, fault: schedule.AnyFault) -> None:
        kept: list[Any] = []
        match fault:
            case schedule.ProcessKill(who, at_s, power, down_s):
                self._schedule(at_s, "kill", lambda: self._kill_side(who, power, down_s))
            case schedule.ConnectionLoss(who, start_s, length_s, keep):
                self._schedule(start_s, "cut", lambda: self.broker.disconnect_client(who, keep=keep))
                self._schedule(start_s + length_s, "", lambda: self.broker.reconnect_client(who))
            case schedule.BrokerRestart(start_s, length_s, sessions, retained):
                self._schedule(start_s, "broker", lambda: self.broker.stop(sessions=sessions, retained=retained))
                self._schedule(start_s + length_s, "", self.broker.start)
            case schedule.ClockJump(who, at_s, sleep_s, wall_s):
                self._schedule(at_s, "jump", lambda: self._shift_clocks(who, sleep_s, wall_s))
            case schedule.JobStop(at_s, length_s):
                self._schedule(at_s, "", lambda: self._set_job_status("stopping", ("running",)))
                self._schedule(at_s + length_s, "", lambda: self._set_job_status("running", ("stopped",)))
            case schedule.NewerCoordinator(start_s, length_s):
                self._schedule(start_s, "ahead", lambda: setattr(self.coordinator, "ahead", True))
                self._schedule(start_s + length_s, "", lambda: setattr(self.coordinator, "ahead", False))
            case schedule.DeviceLoss(who, ack):
                self._deaths[who] = min(ack, self._deaths[who] or ack)
            case schedule.SecondCoordinator(at_s):
                self._schedule(at_s, "second", self._start_second)
            case schedule.BitRot(who, at_s, place):
                self._schedule(at_s, "", lambda: self._flip_bit(who, place))
            case schedule.HomeRestore(at_s, back_s):
                self._schedule(
                    max(0.0, at_s - back_s), "", lambda: kept.append(self.coordinator.platter.copy_contents())
                )
                self._schedule(at_s, "restore", lambda: self._restore_home(kept.pop()))

    def _schedule(self, at_s: float, name: str, do: Callable[[], None]) -> None:
        def run_scheduled() -> None:
            if name:
                self.happened[name] += 1
            self._trouble_s = max(self._trouble_s, self.broker.now_s)
            do()

        self._entered += 1
        heapq.heappush(self._due_times, (at_s, self._entered, run_scheduled))

    def _shift_clocks(self, who: str, sleep_s: float, wall_s: float) -> None:
        side = next((side for side in self.sides if side.name == who), None)
        if side is not None:
            side.shift_clock(sleep_s)
            side.due_s = max(self.broker.now_s, side.up_s)
            self._wall_ns[who] += int(wall_s * 1e9)

    def _kill_side(self, who: str, power: bool, down_s: float) -> None:
        side = next((side for side in self.sides if side.name == who and not side.dead), None)
        if side is not None:
            side.kill_process(power, down_s)
            self.happened["power"] += power
            self._trouble_s = max(self._trouble_s, side.up_s)

    def _flip_bit(self, who: str, place: float) -> None:
        side = next((side for side in self.sides if side.name == who), None)
        if side is not None and side.platter.flip_bit(place):
            self.happened["rot"] += 1

    def _restore_home(self, copied: Any) -> None:
        self.coordinator.restore_home(copied)
        self._restores -= 1
        self._ended.clear()  # a job that had ended may have to go on

    def _open_operator_store(self) -> Store:
        return Store(Path(f"/{COORDINATOR}"), disk=SimDisk(self.coordinator.platter))

    def _set_job_status(self, status: str, when: tuple[str, ...]) -> None:
        id = _job_id(0)
        with self._open_operator_store() as store:
            if store.stored_status(id) in when:
                store.set_status(id, status)
                self.happened["stop"] += status == "stopping"
            elif (
                status == "running" and store.stored_status(id) == "stopping"
            ):  # the coordinator has not got round to it
                self._schedule(self.broker.now_s + 10.0, "", lambda: self._set_job_status(status, when))

    def _start_second(self) -> None:
        if self.coordinator.inner is not None and self.coordinator.can_start_second():
            raise InvariantError("a second coordinator was let into the home of a running one")

    def require_correct(self) -> None:
        """Raise InvariantError if logs or files differ from the reference runs.

        Raises:
            InvariantError: If an invariant is violated.
        """
        with self._open_operator_store() as store:
            logs = {id: [fact for _, _, fact in store.read_events(id)] for id in self.truths}
        causes = {side.name: side.failures for side in self.agents}
        if not self._is_altered and (
            wrong := log_checks.find_causeless_decline(chain.from_iterable(logs.values()), causes)
        ):
            raise InvariantError(wrong)
        for id, facts in logs.items():
            truth = self.truths[id]
            cohorts = self._checked_cohorts(id, facts, truth)
            for side in self.agents if cohorts else ():
                if not side.dead:
                    self._require_private_state(id, side, truth, cohorts)
        self._require_no_tasks()

    @property
    def _is_altered(self) -> bool:
        return bool(self.happened["rot"] or self.happened["restore"])

    def _require_update_or_ack(self, side: AgentProcess) -> None:
        if self._is_altered or side.dead:
            return
        root, disk = side.platter.root, SimDisk(side.platter)
        known = last_counted_rounds(root, disk)
        for id, promised in self.coordinator.promises.items():
            offered = _rounds_in_outbox(disk, root, id)
            for round in (round for round, device in promised.counted if device == side.name):
                if round > known.get(id, -1) and round not in offered:
                    raise InvariantError(
                        f"{side.name} has ended, does not know that round {round} of {id} was counted, and offers it "
                        "no more"
                    )

    def _require_no_tasks(self) -> None:
        for side in self.agents:
            if side.newer or side.dead:  # its messages are refused or missing, so its task stays
                continue
            if task := self.broker.retained_message(wire.Topics(FLEET).device_topic(side.name, "dn", "task")):
                of = wire.decode(task, Task)
                raise InvariantError(f"all jobs have ended, and {side.name} is still sent round {of.round} of {of.job}")

    def _may_fail(self, facts: list[AnyEvent]) -> bool:
        said = "does not allow a device to start with new private state"
        lost = any(isinstance(fact, TaskDeclined) and said in fact.reason for fact in facts)
        return bool(self.happened["rot"] or (self.happened["restore"] and lost))

    def _checked_cohorts(self, id: str, facts: list[AnyEvent], truth: ReferenceRun) -> Cohorts:
        last = facts[-1] if facts else None
        if isinstance(last, JobEnded) and last.status == "failed" and self._may_fail(facts):
            return ()  # the failure names the destroyed blob
        if not isinstance(last, JobEnded) or last.status != "done":
            raise InvariantError(f"{id} has not been done: {last}")
        committed = [fact for fact in facts if isinstance(fact, RoundCommitted)]
        if [fact.round for fact in committed] != list(range(len(committed))):
            raise InvariantError(f"{id}: rounds committed: {[fact.round for fact in committed]}")
        wanted = truth.job.rounds + bool(truth.job.check.every)
        if len(committed) != wanted:
            raise InvariantError(f"{id}: {len(committed)} rounds committed, {wanted} wanted")
        counted: list[dict[str, int]] = [{} for _ in committed]  # device -> round of its update
        contributions = set[Contribution]()
        for fact in facts:
            if isinstance(fact, UpdateAccepted):
                device, round = fact.update.device, fact.update.round
                if (round > fact.round if self.plan.concurrency else round != fact.round) or fact.update.job != id:
                    raise InvariantError(f"{id}: round {fact.round} counted an update of round {round}")
                if device in counted[fact.round] or Contribution(device, round) in contributions:
                    raise InvariantError(f"{id}: round {fact.round} counted {device} twice, of round {round}")
                counted[fact.round][device] = round
                contributions.add(Contribution(device, round))
            elif isinstance(fact, UpdateLost):  # its device is asked for it again, and counts once more
                contributions.remove(Contribution(fact.device, counted[fact.round].pop(fact.device)))
        if not self._is_altered and (wrong := log_checks.check_selections(truth.job, facts)):
            raise InvariantError(f"{id}: {wrong}")
        anew = [fact.round for fact in facts if isinstance(fact, UpdateAccepted) and fact.update.note]
        cohorts: Cohorts = ()
        for fact, devices in zip(committed, counted, strict=True):
            if fact.round in anew and (self.happened["restore"] or self.happened["rot"]):
                return ()  # private state that an older home asks for is lost, or it is damaged; and this is said
            if self.plan.requires_all_devices and len(devices) != self.plan.devices:
                raise InvariantError(
                    f"{id}: round {fact.round} counted {sorted(devices)} of {self.plan.devices} devices"
                )
            cohorts = (*cohorts, tuple(sorted(Contribution(*each) for each in devices.items())))
            if (right := truth.state_after(cohorts).sha256) != fact.state.sha256:
                raise InvariantError(
                    f"{id}: round {fact.round} of {', '.join(sorted(devices))} came to the state "
                    f"{fact.state.sha256[:12]}, and calmly to {right[:12]}"
                )
        return cohorts

    def _require_private_state(self, id: str, side: AgentProcess, truth: ReferenceRun, cohorts: Cohorts) -> None:
        disk, root = SimDisk(side.platter), side.platter.root
        rounds = {each.round: number for number, cohort in enumerate(cohorts) for each in cohort
                  if each.device == side.name}  # fmt: skip
        given = list(rounds)
        remembered = JobRecords(Path(root), disk, durable=True)
        counted = remembered.load_counted()
        last = counted[id].round if id in counted else -1
        if last >= 0 and last not in given and self.happened["restore"]:
            return  # it has counted a round that was played again without it, and has not been asked since
        if last >= 0 and last not in given:
            raise InvariantError(f"{side.name} holds round {last} of {id} for counted; {given} were")
        waiting = _rounds_in_outbox(disk, root, id)
        if unknown := [round for round in given if round > last and round not in waiting]:
            raise InvariantError(
                f"{side.name} does not know that round {unknown} of {id} was counted, and offers it no more"
            )
        node: ReferenceState = truth.state_after(cohorts[: rounds.get(last, -1) + 1])
        private = remembered.find_private_state(id, last) if id in counted else PrivateState()
        kept = None if private.path is None else disk.read(private.path)
        if kept is not None and self.happened["rot"] and hashlib.sha256(kept).hexdigest() != private.sha256:
            return  # its next task is refused for it by name
        if last >= 0 and id in counted and kept != node.private.get(side.name):
            said = "nothing" if kept is None else "another"
            raise InvariantError(f"{side.name} has counted round {last} of {id} and keeps {said} private state of it")

    def close(self) -> None:
        for side in self.sides:
            side.close()
