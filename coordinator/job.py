"""Running job: the method's state and the rounds' state, both rebuilt from the event log.

Every change goes through `record`: the fact is written, then applied. The method's computations
(`task`, `taken`, `commit`) are functions of that state and of blobs on disk.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from fedquilt import bundle, compression, tensors, tiers
from fedquilt.coordinator import checks, folding, manifest, mending, plausible, stop, tasks
from fedquilt.coordinator.admission import Examined
from fedquilt.coordinator.contributed import NEVER
from fedquilt.coordinator.deadline import Ask
from fedquilt.coordinator.eligibility import Seen, Wants
from fedquilt.coordinator.facts import AnyFact, Asked, Committed, Plan, Rounds, Started, apply
from fedquilt.coordinator.folding import blobs
from fedquilt.coordinator.preflight import first_state, needs, require_made_for
from fedquilt.coordinator.round_metrics import average, missing
from fedquilt.coordinator.store import Row, Store
from fedquilt.core import (
    Action,
    BlobRef,
    Contribution,
    DeviceView,
    Expected,
    Method,
    Order,
    Profile,
    Settle,
    StoreError,
    Task,
    Tensors,
    Update,
    UpdateError,
    Work,
    derived,
    expected,
)

READ_BYTES: Final = 32 << 20  # updates of a round that stay in memory after their examination, for the commit
WHOLE_BYTES: Final = 1 << 20  # tensors up to this are encoded as a whole before they are stored
HELD: Final = 2  # tasks whose encoded tensors are kept, so that blobs common to many devices are encoded once


class Running:
    """One job of the store, at the point that its facts have reached.

    Raises:
        JobError, ModelError: the job or its bundle cannot be run as written, or its state is lost.
        StoreError: the store cannot be read or written.
    """

    def __init__(self, row: Row, store: Store, now_s: float, method: Method) -> None:
        self.id, self.job, self._store, self.method = row.id, row.job, store, method
        self.engines = (row.job.engine,) if row.job.engine else tuple(self.method.engines)  # preferred first
        self.bundle, self._bundle_at = bundle.load(row.bundle), row.bundle
        require_made_for(row.job, self.bundle)
        mending.restore(store.depot, row.bundle, self.bundle.files)
        self.wants = Wants(self.engines, row.job.cohort, row.job.wire.codec, tuple(needs(row.job, self.bundle).items()))
        self.state: Any = None
        self._read: dict[str, tuple[Update, Contribution]] = {}  # by device: the running round's, up to READ_BYTES
        self._read_bytes = 0
        self._all_able: tuple[object, Work] | None = None  # fleet at the last look, if the task fitted every device
        self._sent: set[str] = set()  # sha256 of blobs made for the running round's tasks
        self._encoded: dict[int, tuple[Tensors, BlobRef]] = {}  # the last of them, by their tensors' identity
        self._asks: dict[str, Ask] = {}  # device -> its work in the running round
        self._orders: dict[str, Order] = {}  # device -> its order of the running round, if it has no
        self._held = tasks.held_of(row.job.data)
        self._alike = tasks.Common(self._held)  # of the running round
        self._common: Mapping[str, Tensors | BlobRef] = {}  # tensors of its own: bundles that all of them have
        self._seeded: Callable[[object], int] | None = None  # of the running round: a device's seed
        self._manifests: manifest.Manifests | None = None  # of the running round: what its updates may hold
        self.standing, after = store.snapshots.of(self.id, Plan.of(row.job), now_s)
        for _, _, fact in store.facts(self.id, after):
            self._note(fact, apply(self.rounds, fact, now_s))
        self._folding = folding.fresh(self._half.fold)  # of the running round
        if self.rounds.state is None:  # the job is new, or was stopped before it had begun
            self._initialise(now_s)
        else:
            self.state = self._load_state(self.rounds.state)

    @property
    def rounds(self) -> Rounds:
        """State of its rounds."""
        return self.standing.rounds

    def record(self, fact: AnyFact, now_s: float) -> None:
        """Write a fact, then apply it.

        Raises:
            JobError: it is not allowed now, or could not be read back; nothing has been written.
        """
        after = apply(self.rounds, fact, now_s)
        self._store.append(self.id, fact)
        self._note(fact, after)

    def pinned(self) -> set[str]:
        """Blobs that must outlive the running round."""
        return {ref.sha256 for ref in (self.rounds.state, *self.bundle.files.values()) if ref is not None}

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

    def unfit(self, update: Update) -> str:
        """Why an update cannot be folded into the running round, as its manifest says; "": it can, or is not for it."""
        if update.device not in self.rounds.asked or update.round != self.rounds.round or update.job != self.id:
            return ""
        if self._manifests is None:
            known = expected(self._half.fold, self.state) if "work" in self.rounds.actions else Expected({})
            self._manifests = manifest.Manifests(known, self.job.wire, self.job.max_update_mb)
        return self._manifests.unfit(update)

    def examined(self, device: str, update: Update, profile: Profile | None, now_s: float) -> Examined:
        """What is kept of an update whose blobs are here, or why it may not be folded.

        Raises:
            StoreError: the store cannot be read or written.
        """
        ask, odd = self.ask(device, profile), ""
        waited_s = now_s - self.rounds.asked_s.get(device, now_s)
        limit_s = plausible.time_s(waited_s, self.job.cohort.deadline_s, self.rounds.attempt + 1)
        try:
            believed, odd = plausible.bounded(update, ask, limit_s)
            if "work" in self.rounds.actions:
                plausible.require_weight(update, ask, limit_s)
            taken, reason = self.taken(believed, profile), ""
        except StoreError:
            raise
        except Exception as error:  # whatever a device sends, it is the device's update that is refused
            taken, reason = None, str(error) if isinstance(error, UpdateError) else f"{type(error).__name__}: {error}"
        return Examined(device, update, taken, reason, ask, odd)

    def taken(self, update: Update, profile: Profile | None) -> Update:
        """The update as it is stored: with a codec, its tensors are decoded here and nowhere else.

        Raises:
            UpdateError: it cannot be folded into the running round, or is no output of the codec.
        """
        odd = sorted(name for name, value in update.metrics.items() if not math.isfinite(value))
        if odd:
            raise UpdateError(f"metric {odd[0]!r} is not a finite number")
        if update.metrics.get("check.examples", 0.0) < 0:
            raise UpdateError("metric 'check.examples' is negative")
        if "work" not in self.rounds.actions:
            return update
        with checks.named(update.device):
            checks.require_weight(update, self.job.cohort.max_examples)
            if self.job.wire.codec == "raw" and self._folding.holds(update):
                return update
            given = mending.contribution(self._store.depot, update)
            plain = compression.decoded(self.job.wire, given.bundles, lambda name: self._base(update, name, profile))
            given = replace(given, bundles=plain)
            next_one = self._folding.follows(update.device, self.rounds.answered, self.rounds.asked)
            total = self._half.fold(self.state, self._folding.total if next_one else None, given)
        if self.job.wire.codec != "raw":
            try:
                refs = {name: self._stowed(bundle) for name, bundle in plain.items()}
            except StoreError:
                self._folding.forget()  # the sum may have this update, which does not count yet
                raise
            update = msgspec.structs.replace(update, bundles=refs, bases={})
        if not next_one:
            return self._kept(update, given)
        self._folding.take(update.device, folding.told(update), total)
        return update

    def foresee(self, given: Contribution, bundles: Mapping[str, BlobRef]) -> None:
        """Read and fold an expected update early, while other devices are still at work.

        It counts only once it is offered, with the same content. Errors in it are raised then.
        """
        if (
            given.round != self.rounds.round
            or given.device not in self.rounds.asked
            or self.job.wire.codec != "raw"
            or "work" not in self.rounds.actions
            or not self._folding.foreseen(given.device)
        ):
            return
        with contextlib.suppress(Exception):
            for bundle in given.bundles.values():
                tensors.require_finite(bundle)
            total = self._half.fold(self.state, self._folding.total, given)
            self._folding.take(given.device, (given.weight, given.metrics, bundles), total)

    def _stowed(self, bundle: Tensors) -> BlobRef:
        if tensors.total_bytes([bundle]) <= WHOLE_BYTES:
            return self._store.depot.stow(tensors.encode(bundle))
        return self._store.depot.put_by(lambda path: tensors.write(path, bundle))

    def _kept(self, update: Update, given: Contribution) -> Update:
        """Keep the tensors read for the commit, as long as there is room."""
        size = sum(ref.size for ref in update.bundles.values())
        if self._read_bytes + size <= READ_BYTES:
            self._read_bytes += size
            self._read[update.device] = (update, given)
        return update

    def _base(self, update: Update, name: str, profile: Profile | None) -> Tensors | None:
        """Tensors that a bundle's differences start from, as the update names them; None: it holds no differences.

        Raises:
            UpdateError: it names a blob that the running round has not sent.
        """
        sha256 = update.bases.get(name)
        if sha256 is None:
            return None
        order = self._order(update.device, profile)
        asked = {self._blob(value).sha256 for value in order.bundles.values()} if order else set()  # after a restart
        path = self._store.depot.path(sha256) if sha256 in asked | self._sent else None
        if path is None:
            raise UpdateError(f"bundle {name!r} has moved from {sha256[:12]}, which this round has not sent")
        return tensors.Floats(path, self._store.depot.disk)  # one tensor at a time, as it is decoded

    def commit(self, now_s: float) -> Committed:
        """Fold the updates of the round that are not folded yet, and store the result.

        Raises:
            LostUpdateError: one of them can no longer be read.
        """
        answered = self.rounds.answered
        state = self.state
        if "work" in self.rounds.actions:
            for device in self._folding.left(answered):
                known, given = self._read.get(device, (None, None))
                if given is None or known != answered[device]:
                    given = mending.contribution(self._store.depot, answered[device])
                total = self._half.fold(state, self._folding.total, given)
                self._folding.take(device, folding.told(answered[device]), total)
            state = self._half.step(state, self._folding.total)
            checks.require_state(state, tuple(sorted(answered)))
        spent, finished = self.rounds.spent, self.method.done(state)
        caveat = stop.caveat(self.job.stop, spent) if spent.metered or not self.rounds.round else None
        short = None if finished else stop.cut_short(self.method, self.job.method, self.job.rounds, self.rounds.round)
        metrics = average(answered.values())
        return Committed(
            round=self.rounds.round,
            state=self._store.depot.put(tensors.pack(state)),
            finished=finished,
            metrics=metrics,
            notes=(*self.method.explain(state), *filter(None, (caveat, short)), *missing(answered.values(), metrics)),
            took_s=now_s - self.rounds.began_s,
            settled=self.rounds.settling,
        )

    def spent(self, before: Rounds) -> set[str]:
        """Blobs that only the committed round needed: its updates, what it sent, the state it began with."""
        return blobs(before.answered.values()) | self.sent() | ({before.state.sha256} if before.state else set())

    def sent(self) -> set[str]:
        """Blobs made for the running round's tasks."""
        return set(self._sent)

    def committed(self) -> None:
        """Load the stored state and drop the round's blobs."""
        assert self.rounds.state is not None
        self.state = self._load_state(self.rounds.state)
        for held in (self._encoded, self._sent, self._read, self._asks, self._orders):
            held.clear()
        self._alike = tasks.Common(self._held)
        self._read_bytes, self._common, self._seeded, self._manifests = 0, {}, None, None
        self._folding = folding.fresh(self._half.fold)

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
        self.standing.take(fact, after)

    def _initialise(self, now_s: float) -> None:
        self.state = state = first_state(self.job, self.bundle, self.method)
        settles = self.method.settle is not None and self.method.settle.wanted(state)
        self.record(Started(self._store.depot.put(tensors.pack(state)), settles), now_s)

    def _load_state(self, ref: BlobRef) -> Any:
        def again() -> Any:  # the job's first state, made anew; None: the log is past it
            return None if self.rounds.round else first_state(self.job, self.bundle, self.method)

        return mending.state(self.id, self._store.depot, ref, self.method.state, again)

    def _blob(self, value: Tensors | BlobRef) -> BlobRef:
        if isinstance(value, BlobRef):
            named = {name: ref for name, ref in self.bundle.files.items() if ref == value}
            mending.restore(self._store.depot, self._bundle_at, named)
            return value
        known = self._encoded.pop(id(value), None)
        if known is None or not self._store.depot.has(known[1]):
            known = (value, self._store.depot.put(tensors.encode(value)))
        self._encoded[id(value)] = known  # as the latest
        self._sent.add(known[1].sha256)
        return known[1]
