"""Updates of a running round: read, checked, decoded and folded.

Small ones are examined and folded in the coordinator's loop, in one pass over what was read. Large ones
are examined, and folded once they count, by a worker: their tensors are read from the disk one at a time, and each is
added to the sum in place. An exact sum is stored from time to time, as a fact, and what is in it is dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from fedquilt import compression, exact, heap, tensor_files, tensors
from fedquilt.blobs.store import Depot
from fedquilt.coordinator import checks, claims, folding, mending, passed
from fedquilt.coordinator.facts import Folded, Rounds
from fedquilt.coordinator.folding import Folding, Told
from fedquilt.coordinator.mending import WHOLE_BYTES
from fedquilt.coordinator.settings import Job
from fedquilt.core import (
    BlobRef,
    Contribution,
    Method,
    Settle,
    StoreError,
    Tensors,
    Update,
    UpdateError,
    required,
    summed,
)
from fedquilt.core.rights import has_site_bundles
from fedquilt.on_disk import Scratch

READ_BYTES: Final = 32 << 20  # updates of a round that stay in memory after their examination, for the commit

Base = Callable[[str], Tensors | None]
"""`base` for the bundles of one update."""


class Summing:
    """Sum of one running round.

    Args:
        depot: where updates are.
        half: of the method, whose tasks the round's are.
        state: that the round began with.
        job: settings.
        large: keep exact sums of large tensors on the disk; True also once a large update has come.
    """

    def __init__(self, depot: Depot, half: Method | Settle, state: Any, job: Job, *, large: bool = False) -> None:
        self._depot, self._fold, self._state, self._job = depot, half.fold, state, job
        self._sums, self.large = summed(half.fold, state), large
        if large:
            heap.release()  # of the round before
        self._folding = self._empty()
        self._read: dict[str, tuple[Update, Contribution]] = {}  # by device, up to READ_BYTES
        self._read_bytes = 0
        self._unfolded: tuple[Rounds, int, tuple[int, int]] | None = None  # what was counted last, and of what

    # -- small updates, in the loop --

    def read_update(self, update: Update, rounds: Rounds, base: Base, bounds: claims.Bounds) -> Update:
        """Decode, check and store an update, fold it if it is next in order, and return it as stored.

        Raises:
            UpdateError: it cannot be folded, or is no output of the codec.
        """
        of_site = has_site_bundles(update.bundles)
        if self._job.wire.codec == "raw" and not of_site and self._folding.holds(update):
            return update
        with checks.named(update.device):
            given = self._decode(mending.contribution(self._depot, update), base)
            update = self._authorize(update, given, bounds)
            next_one = self._folding.follows(update.device, rounds.answered, rounds.asked)
            next_one = next_one and (self._exact or not of_site)  # a site's boards have places among the others
            if next_one:
                total = self._added(given)
            else:
                required(self._fold, self._state, given)
        try:
            update = self._plain(update, given)
        except StoreError:
            self._folding.forget()  # the sum may have this update, which does not count yet
            raise
        if next_one:
            self._folding.take(update.device, folding.told(update), total)
        else:
            self._keep(update, given)
        return update

    def foreseen(self, rounds: Rounds, round: int, device: str) -> bool:
        """Whether an update of a device is expected that can be folded early."""
        return (
            round == rounds.round
            and device in rounds.asked
            and self._job.wire.codec == "raw"
            and "work" in rounds.actions
            and self._folding.foreseen(device)
        )

    def foresee(self, given: Contribution, bundles: Mapping[str, BlobRef]) -> None:
        """Fold a foreseen update early, while other devices are still at work.

        It counts only once it is offered, with the same content. Errors in it are raised then.
        """
        with contextlib.suppress(Exception):
            for bundle in given.bundles.values():
                tensors.require_finite(bundle)
            total = self._added(given)
            self._folding.take(given.device, (given.weight, given.metrics, bundles), total)

    def folded_from(self, rounds: Rounds) -> str | None:
        """File of the state that the round's updates are folded with; None: nobody else can fold them.

        Somebody else can if they add up, are small, and come as they are.
        """
        able = self._sums is not None and self._job.wire.codec == "raw" and "work" in rounds.actions
        if not able or rounds.settling or rounds.state is None or rounds.state.size > WHOLE_BYTES:
            return None
        return self._depot.verified_path(rounds.state.sha256)

    def foresee_sum(self, rounds: Rounds, round: int, given: Mapping[str, Told], packed: Callable[[], bytes]) -> None:
        """Take the packed sum of updates if all are foreseen; it counts once all of them do, with the same content.

        `packed` waits for it, and is called once the round is committed; b"": there is none.
        """
        if not all(self.foreseen(rounds, round, device) for device in given):
            return

        def total() -> Any:
            with contextlib.suppress(Exception):
                assert self._sums is not None
                return tensors.unpack(packed(), self._sums)
            return None

        self._folding.put_apart(given, total)

    def _keep(self, update: Update, given: Contribution) -> None:
        """Keep the tensors read for the commit, as long as there is room."""
        size = folding.size_of(update)
        if self._read_bytes + size <= READ_BYTES:
            self._read_bytes += size
            self._read[update.device] = (update, given)

    # -- large updates, by a worker: one call at a time --

    def read_large_update(self, update: Update, base: Base, bounds: claims.Bounds) -> Update:
        """Decode, check and store a large update without folding it, and return it as stored."""
        with checks.named(update.device):
            given = self._streamed(update)
            for bundle in given.bundles.values():
                tensors.require_finite(bundle)
            given = self._decode(given, base)
            update = self._authorize(update, given, bounds)
            required(self._fold, self._state, given)
        return self._plain(update, given)

    def waits(self, rounds: Rounds) -> bool:
        """Whether an update that counts can be folded now; in the loop, while no call is under way."""
        return "work" in rounds.actions and not self._folding.holds_all(self._ready(rounds))

    def unfolded(self, rounds: Rounds) -> tuple[int, int]:
        """Number and bytes of updates that could be folded now and are not; in the loop, also during a call."""
        if "work" not in rounds.actions:
            return 0, 0
        known = self._unfolded
        if rounds.phase == "closing":  # the sum goes into the new state
            return known[2] if known else (0, 0)
        if known is None or known[0] is not rounds or known[1] != len(self._folding):
            stored = rounds.folded.devices if rounds.folded else ()
            ready, count = self._ready(rounds), len(self._folding)
            left = [each for device, each in ready.items() if device not in stored and not self._folding.holds(each)]
            self._unfolded = known = rounds, count, (len(left), sum(map(folding.size_of, left)))
        return known[2]

    def carry_on(self, rounds: Rounds, stored_at: float) -> Folded | None:
        """Fold one update, if one can be, and store the sum if so much is folded; returns the fact that it is.

        What is left is folded by later calls: so the loop learns of each that another can come in its place, and no
        more waits to be dropped than is needed.

        Raises:
            LostUpdateError: an update, or the stored sum with it, is gone or damaged.
        """
        self._sum(rounds, most=1)
        if not self._worth_storing(rounds, stored_at):
            return None
        folded = [device for device, update in rounds.answered.items() if self._folding.holds(update)]
        return Folded(rounds.round, tuple(sorted(folded)), stored(self._depot, *tensors.parts(self._folding.total)))

    def _worth_storing(self, rounds: Rounds, stored_at: float) -> bool:
        """Whether updates of so many times the sum's bytes are in it, and in no stored one."""
        if not self._exact or not rounds.asked:
            return False
        folded = [update for update in rounds.answered.values() if self._folding.holds(update)]
        known = rounds.folded.devices if rounds.folded else ()
        new_bytes = sum(folding.size_of(update) for update in folded if update.device not in known)
        own_bytes = tensors.total_bytes([tensors.parts(self._folding.total)[0]]) if new_bytes else 0
        return new_bytes > 0 and new_bytes >= stored_at * own_bytes

    # -- the end of a round --

    def closed(self, rounds: Rounds) -> Any:
        """Sum of a round that takes no more updates; it is held here no more, as a step may use it up.

        Raises:
            LostUpdateError: one of them can no longer be read.
        """
        if self._interleaved(rounds):
            total = self._in_order(rounds.answered)
        else:
            self._sum(rounds)
            total = self._folding.total
        self._folding = self._empty()
        if self.large:
            heap.release()  # a new state is made now
        return total

    def _interleaved(self, rounds: Rounds) -> bool:
        """Whether the boards of sites have places of their own in the order in which updates are folded."""
        return not self._exact and bool(rounds.through)

    def _in_order(self, updates: Mapping[str, Update]) -> Any:
        """Sum of updates among which are sites', in the order of all boards."""
        boards: dict[str, Callable[[], Contribution]] = {}
        for device, update in updates.items():
            if update.boards:
                given = self._streamed(update)
                boards.update({each.device: partial(_as_it_is, each) for each in passed.contributions(given)})
            elif not has_site_bundles(update.bundles):
                boards[device] = partial(self._streamed, update)
        total = None
        for device in sorted(boards):
            total = self._fold(self._state, total, boards[device]())
        return total

    def _ready(self, rounds: Rounds) -> dict[str, Update]:
        """Updates that the sum may hold already."""
        return {} if self._interleaved(rounds) else folding.ready(rounds, self._exact)

    def _sum(self, rounds: Rounds, most: int | None = None) -> None:
        """Fold what can be and is not yet; anew from the stored sum, or from nothing, where the running one is none.

        Args:
            rounds: whose updates they are.
            most: number of updates, the rest of which are left for later; None: all.
        """
        updates = self._ready(rounds)
        self._folding.gather(updates)
        if not self._folding.fits(updates) or not len(self._folding):
            self._folding = self._begun(rounds)
        for device in self._folding.left(updates)[:most]:
            known, given = self._read.get(device, (None, None))
            if given is None or known != updates[device]:
                given = self._streamed(updates[device])
            self._folding.take(device, folding.told(updates[device]), self._added(given))

    def _begun(self, rounds: Rounds) -> Folding:
        """Sum that is stored, if there is one."""
        begun, folded = self._empty(), rounds.folded
        if folded is None:
            return begun
        assert self._sums is not None
        total = mending.stored_sum(self._depot, folded, self._sums, self._room())
        for device in folded.devices:
            begun.take(device, folding.told(rounds.answered[device]), total)
        return begun

    @property
    def _exact(self) -> bool:
        return self._sums is not None

    def _empty(self) -> Folding:
        self._scratch: Scratch | None = None
        return Folding(self._exact)

    def _room(self) -> Scratch:
        """File of the running sum."""
        self._scratch = self._scratch or Scratch(self._depot.folder, self._depot.disk)
        return self._scratch

    def _added(self, given: Contribution) -> Any:
        """The sum with one more update; after an error that may have come halfway, it is begun anew."""
        try:
            with exact.laid(self._room() if self.large and self._exact else None):
                return self._fold(self._state, self._folding.total, given)
        except UpdateError:  # as of a site's: all that is in it is checked before anything of it is added
            raise
        except Exception:
            self._folding.forget()
            raise

    def _streamed(self, update: Update) -> Contribution:
        """The update, whose tensors are read when they are asked for; small ones are in memory."""
        if folding.size_of(update) <= WHOLE_BYTES:
            return mending.contribution(self._depot, update)
        return mending.streamed(self._depot, update)

    def _decode(self, given: Contribution, base: Base) -> Contribution:
        if has_site_bundles(given.bundles):  # the site has decoded them and sends no types and shapes
            return given
        return replace(given, bundles=compression.decoded(self._job.wire, given.bundles, base))

    def _authorize(self, update: Update, given: Contribution, bounds: claims.Bounds) -> Update:
        """Return the update with the devices that a site may speak for, or raise UpdateError if it may not."""
        if not has_site_bundles(given.bundles):
            return update
        parts = passed.parts_of_site(given)
        claims.require_site_boards(update, parts, bounds)
        return msgspec.structs.replace(update, boards=tuple(part.device for part in parts))

    def _plain(self, update: Update, given: Contribution) -> Update:
        """The update as it is stored: as the codec has decoded it."""
        if self._job.wire.codec == "raw" or has_site_bundles(update.bundles):
            return update
        refs = {name: stored(self._depot, bundle, put=self._depot.stow) for name, bundle in given.bundles.items()}
        return msgspec.structs.replace(update, bundles=refs, bases={})


# -- reading and storing --------------------------------------------------------------------------------------


def _as_it_is(given: Contribution) -> Contribution:
    return given


def base(depot: Depot, update: Update, sent: Set[str], name: str) -> Tensors | None:
    """Tensors that a bundle's differences start from; None: it holds no differences.

    Args:
        depot: where they are.
        update: whose bundle it is; it names what each of its bundles starts from.
        sent: sha256 of the blobs that the running round has sent.
        name: of the bundle.

    Raises:
        UpdateError: the round has not sent what it names.
        UnreadableError: the disk fails.
    """
    sha256 = update.bases.get(name)
    if sha256 is None:
        return None
    found = mending.base(depot, update.device, sha256) if sha256 in sent else None
    if found is None:
        raise UpdateError(f"bundle {name!r} has moved from {sha256[:12]}, which this round has not sent")
    return found


def stored(
    depot: Depot, given: Tensors, metadata: dict[str, str] | None = None, put: Callable[[bytes], BlobRef] | None = None
) -> BlobRef:
    """Store tensors as one blob; large ones are never in memory as bytes.

    Args:
        depot: where.
        given: the tensors.
        metadata: stored with them.
        put: stores the bytes of small ones; None: the depot's `put`.
    """
    if tensors.total_bytes([given]) <= WHOLE_BYTES:
        return (put or depot.put)(tensors.encode(given, metadata))
    return depot.put_by(lambda path: tensor_files.write(path, given, metadata, depot.disk))
