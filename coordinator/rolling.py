"""The rollouts of a home, carried out beside its jobs: what boards say becomes facts, and facts become releases.

It decides nothing itself: `rollouts.decide_rollout` says which fact comes next, and `rollouts.release` what a board is
to have. Facts are written before anything is sent that rests on them, so a coordinator that is killed goes on where it
was.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from fedquilt import wire
from fedquilt.coordinator import rollouts
from fedquilt.coordinator.executors import Executor
from fedquilt.coordinator.fleet import Registry
from fedquilt.coordinator.outgoing import KINDS
from fedquilt.coordinator.rollouts import Aborted, AnyFact, Heard, Offered, RolledBack, Rollout, Seen
from fedquilt.coordinator.store import Store
from fedquilt.core import FedquiltError, Profile, StoreError, shorten_error
from fedquilt.logs import about

log = logging.getLogger("fedquilt.coordinator")

SETTLE_S: Final = 5.0  # after a new session with the broker, until it has told which boards there are
RESEND_S: Final = 5.0  # until a release that a board has said nothing of is sent again; then ever more rarely
RESEND_MOST_S: Final = 60.0
ASK_S: Final = 600.0  # until a release that a board has not ended with is sent again: it says how far it is
LOOK_S: Final = 2.0  # between two looks for releases that are to be sent again
FACTS_MOST: Final = 100  # that a board may add to the log of one rollout in one life of the coordinator

Tell = Callable[[Rollout, AnyFact], None]


class Rolling:
    """All rollouts of a store.

    Args:
        registry: of the devices, which its owner keeps.
        poll_s: interval at which the store is asked for new rollouts and wishes.
        tell: is called with each new fact, and the rollout after it.

    Raises, from every method that has `now_s`:
        StoreError: nothing can be written any more.
    """

    def __init__(
        self,
        executor: Executor,
        store: Store,
        registry: Registry,
        poll_s: float,
        tell: Tell = lambda rollout, fact: None,
    ) -> None:
        self._executor, self._store, self._registry = executor, store, registry
        self._every_s, self._tell = poll_s, tell
        self._states: dict[str, Rollout] = {}  # in the order in which they were queued
        self._owners: dict[tuple[wire.Kind, str], str] = {}  # kind and device -> the rollout that offered to it last
        self._told: list[tuple[str, wire.Installed]] = []  # and not written yet
        self._told_s: dict[str, float] = {}  # device -> when it was offered something, or told something new
        self._sent: dict[tuple[wire.Kind, str], tuple[float, float]] = {}  # when a release was sent, until the next
        self._facts: Counter[tuple[str, str]] = Counter()  # rollout and device -> facts
        self._warned: set[str] = set()  # rollouts whose rows cannot be read
        self._opened_s = math.inf  # when the session with the broker began, as far as it is known here
        self._poll_s = self._resend_s = -math.inf
        self._arrived = True  # whether a board has come, or a rollout ended, since the finished ones were looked at

    # -- what happens --

    def heard(self, device: str, message: wire.Installed) -> None:
        """Note what a board has said of a release, for the next step."""
        self._told.append((device, message))

    def appeared(self, device: str, now_s: float) -> None:
        """Send a board that has just come its releases again, which it or the broker may have lost."""
        self._arrived = True
        for kind in KINDS:
            if (kind, device) in self._owners:
                self._send_release(kind, device, now_s)

    def say_all_again(self, now_s: float) -> None:
        """Send every open release again in a new session with the broker, which may have lost what it retained."""
        self._opened_s = now_s
        for kind, device in self._owners:
            if self._states[self._owners[kind, device]].phase(device) not in rollouts.SETTLED:
                self._send_release(kind, device, now_s)

    def step(self, now_s: float) -> float:
        """Do everything that is due; returns when to call again."""
        self._opened_s = min(self._opened_s, now_s)
        polled = now_s >= self._poll_s + self._every_s
        if polled:
            self._poll_s = now_s
            self._look(now_s)
        if heard := self._told:
            self._told = []
            self._take(heard, now_s)
        if polled or heard:
            self._decide(now_s)
        if now_s >= self._resend_s:
            self._send_again(now_s)
        return min(self._poll_s + self._every_s, self._resend_s)

    # -- within --

    def _look(self, now_s: float) -> None:
        """Read new rollouts and wishes from the store."""
        kept = self._store.rollouts
        for found in kept.all():
            state = self._states.get(found.state.id)
            if state is None:
                state = self._states[found.state.id] = found.state
                self._own(state, state.offered)
                wall_s = self._store.depot.disk.wall_s()
                if (restarted := rollouts.restarted(state, wall_s - found.at)) is not None:
                    self._record([(state.id, restarted)], now_s)
                    state = self._states[state.id]
                if state.offered:  # it was under way when the last coordinator ended
                    self._issue(state, state.offered, now_s)
            if found.wish:
                self._grant(state, found.wish, now_s)
        for id, why in kept.unreadable().items():
            if id not in self._warned:
                self._warned.add(id)
                log.error("%s", why)

    def _grant(self, state: Rollout, wish: str, now_s: float) -> None:
        """Do what somebody asks for, as far as the rollout still allows it."""
        if wish == "abort" and state.under_way:
            self._record([(state.id, Aborted("by request", self._store.rollouts.serial()))], now_s)
        elif wish == "roll back" and state.status == "done":
            self._record([(state.id, RolledBack(self._store.rollouts.serial()))], now_s)
        self._store.rollouts.wish(state.id, "")

    def _take(self, heard: Iterable[tuple[str, wire.Installed]], now_s: float) -> None:
        """Write what boards have said, all at once."""
        latest: dict[tuple[str, str], Rollout] = {}
        facts: list[tuple[str, AnyFact]] = []
        for device, message in heard:
            id = self._owners.get((message.kind, device))
            if id is None:
                continue
            state = latest.get((id, device), self._states[id])
            fact = rollouts.told(state, device, message)
            if fact is None:
                continue
            self._facts[id, device] += 1
            if (said := self._facts[id, device]) > FACTS_MOST:
                if said == FACTS_MOST + 1:
                    log.warning("%s says ever more of %s: it is not noted any more", device, id)
                continue
            latest[id, device] = rollouts.apply(state, fact)
            facts.append((id, fact))
        self._record(facts, now_s)

    def _decide(self, now_s: float) -> None:
        """Make all decisions that are due, once it is known which boards there are, and while they can be heard."""
        if self._executor.absence.away or now_s < self._opened_s + SETTLE_S:
            return
        arrived, self._arrived = self._arrived, False
        for id in list(self._states):
            while (state := self._states[id]).under_way or (arrived and state.status == "done"):
                without = rollouts.left_out(state.plan, self._profiles()) if state.status == "queued" else None
                fact = rollouts.decide_rollout(state, self.fleet(state), now_s, self._store.rollouts.serial(), without)
                if fact is None:
                    break
                self._record([(id, fact)], now_s)

    def fleet(self, state: Rollout) -> dict[str, Seen]:
        """The boards that a rollout selects, or has offered its release to, and that no later one has or will have."""
        found = {}
        for device in {*self._registry.devices, *state.offered}:
            known = self._registry.devices.get(device)
            online = known is not None and known.online  # one that has just gone is no canary
            gone_s = known.gone_s if known is not None and not online else -math.inf
            opened_s = self._opened_s - rollouts.waited_s(state, device, online)
            since_s = max(opened_s, self._told_s.get(device, -math.inf), gone_s)
            profile = known.profile if known is not None else None
            able = profile is None or not rollouts.hindrance(state.plan, profile)
            found[device] = Seen(online, since_s, None if profile is None else profile.labels, able)
        return rollouts.concerned(state, list(self._states.values()), found)

    def _profiles(self) -> dict[str, Profile]:
        known = self._registry.devices
        return {device: each.profile for device, each in known.items() if each.profile is not None}

    def _record(self, facts: list[tuple[str, AnyFact]], now_s: float) -> None:
        """Write facts, then act on them."""
        if not facts:
            return
        self._store.rollouts.append(facts)
        for id, fact in facts:
            state = self._states[id] = rollouts.apply(self._states[id], fact)
            self._tell(state, fact)
            match fact:
                case Offered(devices=devices):
                    self._own(state, devices)
                    self._told_s.update(dict.fromkeys(devices, now_s))
                    self._issue(state, devices, now_s)
                case Aborted() | RolledBack():
                    self._arrived = True
                    self._issue(state, state.offered, now_s)
                case Heard(device):
                    self._told_s[device] = now_s
                    if state.over:  # what it says may change what it is to be sent
                        self._issue(state, [device], now_s)
                case rollouts.Done():
                    self._arrived = True

    def _own(self, state: Rollout, devices: Iterable[str]) -> None:
        for device in devices:
            self._owners[state.plan.kind, device] = state.id

    def _issue(self, state: Rollout, devices: Iterable[str], now_s: float) -> None:
        """Send boards what a rollout has for them, except boards that a later rollout was offered to."""
        for device in sorted(devices):
            if self._owners[state.plan.kind, device] == state.id:
                self._send_release(state.plan.kind, device, now_s)

    def _send_release(self, kind: wire.Kind, device: str, now_s: float) -> None:
        """Send a device its release and schedule the next repetition. If sending fails, abort the rollout."""
        state = self._states[self._owners[kind, device]]
        try:
            self._executor.release(device, kind, rollouts.release(state, device))
        except StoreError:
            raise
        except FedquiltError as error:
            if not state.over:
                log.error("%s cannot be sent to %s: %s", state.id, device, error, extra=about(device=device))
            if state.status == "running":
                self._record([(state.id, Aborted(shorten_error(str(error)), self._store.rollouts.serial()))], now_s)
            return
        if (phase := state.phase(device)) not in rollouts.SETTLED:
            before = self._sent.get((kind, device), (0.0, RESEND_S / 2))[1]
            self._sent[kind, device] = (now_s, ASK_S if phase else min(2 * before, RESEND_MOST_S))
            self._resend_s = min(self._resend_s, now_s + self._sent[kind, device][1])

    def _send_again(self, now_s: float) -> None:
        """Send releases again to boards that are online and have not ended with them, as a message may be lost."""
        views = self._registry.seen(now_s)
        for (kind, device), (sent_s, patience_s) in list(self._sent.items()):
            state = self._states[self._owners[kind, device]]
            phase = state.phase(device)
            if phase in rollouts.SETTLED:
                del self._sent[kind, device]
            elif phase and patience_s < ASK_S:
                self._sent[kind, device] = (now_s, ASK_S)
            elif now_s >= sent_s + patience_s and device in views and views[device].online:
                self._send_release(kind, device, now_s)
        ends = (sent_s + patience_s for sent_s, patience_s in self._sent.values())
        self._resend_s = max(min((end for end in ends if end > now_s), default=math.inf), now_s + LOOK_S)
