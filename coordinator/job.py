"""Running job: the method's state and the rounds' state, both rebuilt from the event log.

Every change goes through `record`: the fact is written, then applied. The method's computations
(`task`, `taken`, `commit`) are functions of that state and of blobs on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from fedquilt import metrics, tensors, tiers
from fedquilt.coordinator import checks, claims, encoding, manifest, mending, stop, summing, tasks
from fedquilt.coordinator.admission import Examined
from fedquilt.coordinator.contributed import NEVER
from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.eligibility import Seen, Wants
from fedquilt.coordinator.encoding import Done, Encoded
from fedquilt.coordinator.facts import AnyFact, Asked, Committed, Folded, Rounds, Started, apply
from fedquilt.coordinator.folding import blobs, size_of
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.preflight import needs, require_made_for
from fedquilt.coordinator.round_metrics import (
    add_up,
    average_metrics,
    explain_evaluation,
    explain_missing_metrics,
    explain_unchanged_loss,
)
from fedquilt.coordinator.rounds import on_process_clock, restart_event
from fedquilt.coordinator.states import Opened, States
from fedquilt.coordinator.store import Row, Store
from fedquilt.coordinator.summing import Summing
from fedquilt.core import (
    Action,
    BlobRef,
    DeviceView,
    Expected,
    Method,
    Order,
    Profile,
    Settle,
    SiteRight,
    StoreError,
    Task,
    Tensors,
    Update,
    UpdateError,
    Work,
    derived,
    expected,
)

HELD: Final = 2  # tasks whose encoded tensors are kept, so that blobs common to many devices are encoded once


class Running:
    """Job in the state of its event log, which continues after `continue_from`. Parts of `large_bytes` are on disk.

    The running attempt has its whole deadline or, if time goes by the store's clock, what is left
    (`rounds.restart_event`).

    Raises:
        JobError: the job cannot be run as written, or its log or bundle cannot be used.
        UnreadableError: the disk fails where the bundle is read.
        StoreError: the store cannot be read.
    """

    def __init__(
        self, row: Row, store: Store, now_s: float, method: Method, large_bytes: float = math.inf, by_wall: bool = False
    ) -> None:
        self.id, self.job, self._store, self.method, self._large_bytes = row.id, row.job, store, method, large_bytes
        self.engines = (row.job.engine,) if row.job.engine else tuple(self.method.engines)  # preferred first
        self.bundle = mending.bundle_of(row.id, row.bundle, store.depot)
        require_made_for(row.job, self.bundle)
        self._states = States(row.id, row.job, method, self.bundle, row.bundle, store.depot, large_bytes)
        self.wants = Wants(self.engines, row.job.cohort, row.job.wire.codec, tuple(needs(row.job, self.bundle).items()))
        self.state: Any = None
        self._all_able: tuple[object, Work] | None = None  # fleet at the last look, if the task fitted every device
        self._sent: set[str] = set()  # sha256 of blobs made for the running round's tasks
        self._encoded: Encoded = {}  # the last of them
        self._losses: dict[int, float] = {}  # round of work -> its loss, since this process took up the job
        self._asks: dict[str, Ask] = {}  # device -> its work in the running round
        self._orders: dict[str, Order] = {}  # device -> its order of the running round, if it has no
        network = self.bundle.meta.get("network", {})
        self._predicts = metrics.task_of(network), network.get("classes")
        self._held = tasks.held_of(row.job.data)
        self._alike: tasks.Common  # of the running round, as are the next five
        self._common: Mapping[str, Tensors | BlobRef]  # tensors of its own: bundles that all of them have
        self._seeded: Callable[[object], int] | None  # a device's seed
        self._manifests: manifest.Manifests | None  # what its updates may hold
        self._summing: Summing
        self.standing, after = store.snapshots.load_state(self.id, Plan.of(row.job), now_s)
        self.rounds = self.standing.rounds  # state of its rounds
        wall_s = store.depot.disk.wall_s()
        for _, at, fact in store.facts(self.id, after):
            self._note(fact, apply(self.rounds, fact, now_s - (wall_s - at) * by_wall))
        self.rounds = self.standing.rounds = on_process_clock(self.rounds, now_s, by_wall)
        self._by_wall = by_wall

    @property
    def opens_large(self) -> bool:
        """Whether what the job goes on from is for a worker to read, and to make if the job is new."""
        state_bytes = self.rounds.state.size if self.rounds.state else 0
        return state_bytes + sum(ref.size for ref in self.bundle.files.values()) >= self._large_bytes

    def opening(self) -> Callable[[], Opened]:
        """Function that reads the job's state, or makes the first one, in the loop or a worker: see `States.opened`."""
        return partial(self._states.opened, self.rounds)

    def continue_from(self, found: Opened, now_s: float) -> None:
        """Continue from the state that `opening` has loaded, and record a first start or a restart."""
        if self.rounds.state is None:
            self.record(Started(found.ref, found.settles), now_s)
        elif self._by_wall and (fact := restart_event(self.rounds, now_s)) is not None:
            self.record(fact, now_s)
        self.state = found.state
        self.encoded(found.encoded)
        self._begin()

    def record(self, fact: AnyFact, now_s: float) -> None:
        """Write a fact, then apply it.

        Raises:
            JobError: it is not allowed now, or could not be read back; nothing has been written.
        """
        after = apply(self.rounds, fact, now_s)
        self._store.append(self.id, fact)
        self._note(fact, after)

    def pinned(self) -> set[str]:
        """Blobs that must outlive what follows from the next fact: the bundle, the state and a stored sum."""
        sum = self.rounds.folded.sum if self.rounds.folded else None
        return {ref.sha256 for ref in (self.rounds.state, sum, *self.bundle.files.values()) if ref is not None}

    def task(
        self, device: str, engine: str, profile: Profile | None, now_s: float, actions: tuple[Action, ...] | None = None
    ) -> Task | None:
        """Task for `device` in the running round; None: the method has nothing for it.

        Args:
            device: id.
            engine: engine of the device that is to be used.
            profile: of the device; None: not known.
            now_s: seconds of the coordinator's clock.
            actions: None: those of the round.
        """
        known = self._asks.get(device)
        kept = self._orders.get(device) if known is not None and known.profile == profile else None
        if (order := kept or self._order(device, profile)) is None:
            return None
        self._seeded = self._seeded or derived(self.job.seed, self.job.name, self.rounds.round)
        asked = actions or self.rounds.actions
        made = self._alike.task(
            order,
            (engine, asked, self.rounds.attempt, self.rounds.deadline_left_s(now_s), now_s),
            lambda: tasks.make_task(
                order,
                blob=self._blob,
                job=self.id,
                round=self.rounds.round,
                attempt=self.rounds.attempt,
                method=self.job.method,
                engine=engine,
                work=self._ask_of(order, engine, asked).work,
                actions=asked,
                seed=0,
                deadline_s=self.rounds.deadline_left_s(now_s),
                wire=self.job.wire,
                state=self.rounds.state.sha256 if self.rounds.state else "",
            ),
            seed=self._seeded(device),
            tier=tiers.tier(profile),
            counted=self.rounds.history.get(device, NEVER).last,
        )
        while len(self._encoded) > HELD * len(made.bundles):  # drop the parts that were cut for each device alone
            del self._encoded[next(iter(self._encoded))]
        return made

    def ask(self, device: str, profile: Profile | None) -> Ask:
        """Work of `device` in the running round."""
        known = self._asks.get(device)
        if known is None or known.profile != profile:
            order = self._order(device, profile)
            known = Ask(Work(), profile)
            if order is not None:
                able = [engine for engine in self.engines if profile is not None and engine in profile.engines]
                known = self._ask_of(order, (able or self.engines)[0], self.rounds.actions)._replace(profile=profile)
            self._asks[device] = known
            self._orders.pop(device, None)
            if order is not None:
                self._keep(device, order)
        return known

    def _ask_of(self, order: Order, engine: str, actions: tuple[Action, ...]) -> Ask:
        return self._alike.ask(order, actions, engine, self._half is self.method and self.method.uneven)

    def _keep(self, device: str, order: Order) -> None:
        """Keep an order for when its task is made, unless it holds tensors that the others' do not: they take room."""
        self._common = self._common or order.bundles
        if all(value is self._common.get(name) for name, value in order.bundles.items()):
            self._orders[device] = order

    def covered(self, fact: Asked, seen: Mapping[str, Seen]) -> tuple[str, ...]:
        """Sentences on which devices could take part: in the first round, and whenever some could not.

        Args:
            fact: selection of the round.
            seen: views of the fleet; the same object as before means the same fleet.
        """
        asked = fact.devices[0] if fact.devices else ""
        order = self._order(asked, seen[asked].profile if asked in seen else None)
        if order is None or fact.attempt or self.rounds.phase != "selecting":
            return ()
        if fact.round and self._all_able is not None and self._all_able[0] is seen and self._all_able[1] == order.work:
            return ()
        fleet = {device: each.profile for device, each in seen.items() if each.online and each.profile is not None}
        if not fleet:
            return ()
        members = [
            tiers.Member(profile, self.standing.examples.get(device)) for device, profile in sorted(fleet.items())
        ]
        found = tiers.coverage(members, self.engines, order.work)
        everybody = all(share.able == share.devices for share in found.values())
        self._all_able = (seen, order.work) if everybody else None
        return () if everybody and fact.round else tuple(tiers.lines(found, order.work))

    def unfit(self, update: Update, profile: Profile | None = None) -> str:
        """Return why an update's manifest does not fit the running round, or "" if it fits or is of another."""
        if update.device not in self.rounds.asked or update.round != self.rounds.round or update.job != self.id:
            return ""
        if self._manifests is None:
            known = expected(self._half.fold, self.state) if "work" in self.rounds.actions else Expected({})
            self._manifests = manifest.Manifests(known, self.job.wire, self.job.max_update_mb)
        return self._manifests.unfit(update, profile.boards if profile else 0)

    @property
    def large(self) -> bool:
        """Whether the running round's updates or states are for a worker, or a sum of it is stored."""
        return self._summing.large

    def build_examination(
        self,
        device: str,
        update: Update,
        profile: Profile | None,
        now_s: float,
        *,
        large: bool,
        right: SiteRight | None = None,
    ) -> Callable[[], Examined]:
        """Return a function that validates an update and returns what is kept of it, or why it is refused.

        Args:
            device: that sent it.
            update: as it was announced.
            profile: of the device; None: not known.
            now_s: seconds of the coordinator's clock.
            large: the function is for a worker, in which it uses nothing that the loop changes.
            right: of the device, if it is a site.

        Raises, from the function:
            LostUpdateError: a blob of it is damaged, or cannot be read; it is put aside.
            UnreadableError: the disk fails where something else is read.
            StoreError: the store cannot be read or written.
        """
        ask = self.ask(device, profile)
        waited_s = now_s - self.rounds.asked_s.get(device, now_s)
        limit_s = claims.longest_work_s(waited_s, self.rounds.longest_s, self.rounds.attempt + 1)
        limit, standing = self.job.cohort.max_examples, self.standing
        weight, examples = (
            standing.weights.largest_allowed(device, limit),
            standing.reported.largest_allowed(device, limit),
        )
        work, checks = "work" in self.rounds.actions, "check" in self.rounds.actions
        bounds = claims.Bounds(ask, limit_s, weight, examples, right, checks, *self._predicts)
        take = self.build_update_reader(update, profile, bounds, large=large)

        def examined() -> Examined:
            odd = ""
            try:
                believed, odd = claims.limit_claims(update, bounds)
                claims.require_plausible(update, bounds, work=work)
                taken, reason = take(believed) if work else believed, ""
            except mending.UnreadableError as error:
                if error.again not in blobs([update]):
                    raise
                self._store.depot.discard_damaged(error.again)  # its device has it still: other sectors may take it
                raise mending.LostUpdateError(device, str(error)) from None
            except (StoreError, mending.LostUpdateError):
                raise
            except Exception as error:  # whatever a device sends, it is the device's update that is refused
                plain = isinstance(error, UpdateError)
                taken, reason = None, str(error) if plain else f"{type(error).__name__}: {error}"
            return Examined(device, update, taken, reason, ask, odd)

        return examined

    def build_update_reader(
        self, update: Update, profile: Profile | None, bounds: claims.Bounds, *, large: bool = False
    ) -> Callable[[Update], Update]:
        """Return a function that decodes and stores an update, and folds it if it is small and next in order."""
        rounds, summing = self.rounds, self._summing
        base = self._base(update, profile)

        def take(believed: Update) -> Update:
            if large:
                return summing.read_large_update(believed, base, bounds)
            return summing.read_update(believed, rounds, base, bounds)

        return take

    @property
    def sums(self) -> Summing:
        """Sum of the running round's updates."""
        return self._summing

    def _base(self, update: Update, profile: Profile | None) -> summing.Base:
        """Function that finds the tensors that an update's differences start from: blobs that this round has sent."""
        order = self._order(update.device, profile) if update.bases else None
        asked = {self._blob(value).sha256 for value in order.bundles.values()} if order else set()  # after a restart
        return partial(summing.base, self._store.depot, update, asked | self._sent if update.bases else set())

    def waits_to_fold(self) -> bool:
        """Whether updates that count could be folded now."""
        return self.rounds.phase == "open" and self._summing.waits(self.rounds)

    def folding(self, stored_at: float) -> Callable[[], Folded | None]:
        """Function for a worker that folds them; it returns the fact that the sum is stored, if it has stored it.

        It does where updates of so many times the sum's bytes are in it that are on the disk too.
        """
        return partial(self._summing.carry_on, self.rounds, stored_at)

    def committing(self, now_s: float) -> Callable[[], Done]:
        """Function that folds what is left of the round's updates, and stores the state that follows.

        It is for the loop or for a worker; nothing is folded meanwhile. Raises LostUpdateError if an update is gone.
        """
        return partial(self._compute_commit, self.rounds, now_s)

    def _compute_commit(self, rounds: Rounds, now_s: float) -> Done:
        """Compute and store the next state. Return it with the commit event and the encoded bundles."""
        state = self.state
        if "work" in rounds.actions:
            state = self._half.step(state, self._summing.closed(rounds))
            checks.require_state(state, tuple(sorted(rounds.answered)))
        spent, finished, updates = rounds.spent, self.method.done(state), rounds.answered.values()
        caveat = stop.caveat(self.job.stop, spent) if spent.metered or not rounds.round else None
        short = None if finished else stop.cut_short(self.method, self.job.method, self.job.rounds, rounds.round)
        means = average_metrics(updates)
        if "work" in rounds.actions and not rounds.settling and "loss" in means:
            self._losses[rounds.counted] = means["loss"]
        told = caveat, short, explain_unchanged_loss(self._losses, self.job.params.get("lr"))
        explained = (*explain_missing_metrics(updates, means), *explain_evaluation(updates))
        fact = Committed(
            round=rounds.round,
            state=summing.stored(self._store.depot, *tensors.parts(state)),
            finished=finished,
            metrics=means,
            notes=(*self.method.explain(state), *filter(None, told), *explained),
            took_s=now_s - rounds.began_s,
            settled=rounds.settling,
            evaluation=add_up(updates),
        )
        del state  # what is stored is loaded instead
        state = self._states.load(fact.state, rounds.round, again=True)
        return Done(fact, state, encoding.encoded(self.method, state, fact.state, self._store.depot))

    def encoded(self, found: Encoded) -> None:
        """Use what is stored for the running round's tasks."""
        self._encoded = found
        self._sent.update(ref.sha256 for _, ref in found.values())

    def spent(self, before: Rounds) -> set[str]:
        """Blobs that only the committed round needed: its updates and sum, what it sent, the state it began with."""
        refs = [before.state, before.folded.sum if before.folded else None]
        return blobs(before.answered.values()) | self.sent() | {ref.sha256 for ref in refs if ref is not None}

    def sent(self) -> set[str]:
        """Blobs made for the running round's tasks."""
        return set(self._sent)

    def committed(self, done: Done) -> None:
        """Take up the state that follows from a round, and drop the round's blobs."""
        self.state = done.state
        for held in (self._sent, self._asks, self._orders):
            held.clear()
        self.encoded(done.encoded)
        self._begin()

    def _begin(self) -> None:
        """Begin a round: what is the same for all its devices is not known yet."""
        self._alike = tasks.Common(self._held)
        self._common, self._seeded, self._manifests = {}, None, None
        known = expected(self._half.fold, self.state)
        of_update = tensors.total_bytes(known.bundles.values()) if known else 0
        of_state = self.rounds.state.size if self.rounds.state else 0
        largest = max(of_update, of_state, *map(size_of, self.rounds.answered.values()))
        large = largest >= self._large_bytes or self.rounds.folded is not None
        self._summing = Summing(self._store.depot, self._half, self.state, self.job, large=large)

    def _order(self, device: str, profile: Profile | None) -> Order | None:
        view = DeviceView(device, profile, self.rounds.history.get(device, NEVER))
        order = self._alike.order(self._half.send, self.state, view)
        return tasks.trained_for(order, self.rounds.epochs.get(device))

    @property
    def _half(self) -> Method | Settle:
        """The part of the method that the running round's tasks belong to."""
        return self.method.settle if self.rounds.settling and self.method.settle else self.method

    def _note(self, fact: AnyFact, after: Rounds) -> None:
        for device in fact.epochs if isinstance(fact, Asked) else ():
            self._asks.pop(device, None)  # of the job's epochs
        self.standing.apply_fact(fact, after)
        self.rounds = after

    def _blob(self, value: Tensors | BlobRef) -> BlobRef:
        if isinstance(value, BlobRef):
            named = {name: ref for name, ref in self.bundle.files.items() if ref == value}
            self._states.restore(named)
            return value
        known = self._encoded.pop(id(value), None)
        if known is None or not self._store.depot.has(known[1]):
            known = (value, summing.stored(self._store.depot, value))
        self._encoded[id(value)] = known  # as the latest
        self._sent.add(known[1].sha256)
        return known[1]
