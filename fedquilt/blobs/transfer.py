"""Transfers of blobs over a link, both ways, for both sides.

`fedquilt.blobs.download` and `fedquilt.blobs.chunks` decide; this reads, writes and publishes.

An agent publishes "up" and a coordinator "dn"; each asks on `.../<its way>/blob/get` and is answered
under the other's `.../blob/<sha256>/`. Chunks go unreliably, because lost ones are requested
again; requests and refusals go reliably. What is wanted in turn waits in `fedquilt.blobs.queueing`, whatever brings it.
Only chunks are in memory, never a blob: at most `budget_bytes` of them queued to be sent, and at most as much requested
and not yet written.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.carriers import Carriers
from fedquilt.blobs.download import PATIENCE_S, Pull
from fedquilt.blobs.queueing import Queue
from fedquilt.blobs.sending import HASHED_BYTE_S, Sender
from fedquilt.blobs.store import Depot
from fedquilt.blobs.streaming import Streaming
from fedquilt.core import BlobRef, LinkError, Place, Placed, StoreError, Wired
from fedquilt.transport.link import Link

Key = tuple[str, str]  # device, sha256

_LEAVES: Final = frozenset({"get", "manifest", "missing", "chunk", "place", "placed"})
_DRAIN_POLL_S: Final = 0.01  # interval between looks at a link with a full queue
_OFFLINE_POLL_S: Final = 1.0
_MANY: Final = 128  # pulls at once of blobs that are small together


class Transfers:
    """Fetches wanted blobs and serves requested ones, as it is stepped."""

    def __init__(
        self,
        link: Link,
        depot: Depot,
        topics: wire.Topics,
        direction: wire.Direction,
        allowed: Callable[[str, str], bool],
        budget_bytes: int = 4 << 20,
        max_pulls: int = 16,
        patience_s: float = PATIENCE_S,
        carriers: Carriers | None = None,
        apart_bytes: float = math.inf,
    ) -> None:
        """`direction` is the way this side publishes; `allowed(device, sha256)`: may be sent to (or by) this device.

        `max_pulls` are active at once, or more of small blobs; the others wait, as do those of a silent peer.
        `carriers` move blobs beside the link. One that is whole is hashed in a thread if it has `apart_bytes` or more.
        """
        self._link, self._depot, self._topics = link, depot, topics
        self._direction: wire.Direction = direction
        # a coordinator alone reads what it fetches; of what a device fetches, files have to lie side by side
        self._store = depot.stow if direction == "dn" else depot.put
        self._allowed = allowed
        self._budget_bytes = budget_bytes
        self._max_pulls = max_pulls
        self._patience_s, self._apart_bytes = patience_s, apart_bytes
        self._wanted: dict[Key, BlobRef] = {}
        self._askers: dict[str, dict[Key, None]] = {}  # sha256 -> the keys of `_wanted` with it, in order
        self._waiting: dict[Key, None] = {}  # in order
        self.queue = Queue()  # of devices whose blobs come in turn
        self._held: dict[str, dict[Key, None]] = {}  # device that waits for its turn -> keys of these blobs, in order
        self._pulls: dict[Key, Pull] = {}  # begun, some of them parked
        self._open: dict[Key, Pull] = {}  # active, the longest without a request first
        self._done: list[tuple[str, str, str | None]] = []
        self._streaming = Streaming(carriers or Carriers(), depot, self._publish)
        self._sender = Sender(
            link, depot, topics, direction, allowed, budget_bytes, self._streaming, strain=self._strain
        )
        self._came_bytes: Counter[str] = Counter()  # device -> bytes of chunks, repetitions included
        self._strain_s: dict[str, float] = {}
        self._unasked: list[str] = []
        self._session = link.session

    # -- what the owner asks --

    def fds(self) -> Sequence[int]:
        """File descriptors that are readable when a transfer beside the link has ended."""
        return self._streaming.fds()

    def want(self, device: str, ref: BlobRef, *, in_turn: bool = False) -> None:
        """Fetch a blob from a device (an agent names itself), perhaps in its turn; `take_done` reports its arrival."""
        key = (device, ref.sha256)
        if key in self._wanted:
            return
        self._wanted[key] = ref
        self._askers.setdefault(ref.sha256, {})[key] = None
        if self._depot.has(ref):
            self._end(key, None)
        elif in_turn and not self.queue.join(device, ref.sha256, ref.size):
            self._held.setdefault(device, {})[key] = None
        else:
            self._waiting[key] = None

    def cancel(self, device: str, sha256: str) -> None:
        """Stop fetching; chunks on disk already serve the next attempt."""
        self._forget((device, sha256))

    def give_way(self, device: str, now_s: float) -> None:
        """End a device's turn, where others wait for theirs; it keeps what has come, and waits behind them."""
        if not self.queue or not self.queue.sends(device):
            return
        keys = [(device, sha256) for sha256 in self.queue.of(device)]
        if held := [key for key in keys if key in self._open and self._open[key].held]:
            for key in held:
                self._streaming.hand_over(key, "it takes too long, and others wait for their turn")
        else:
            self._park(keys, now_s)

    def take_done(self) -> list[tuple[str, str, str | None]]:
        """(device, sha256, error or None) of the transfers that have ended since the last call."""
        done, self._done = self._done, []
        return done

    def traffic_bytes(self, device: str, direction: wire.Direction) -> int:
        """Chunk bytes sent to ("dn") or received from ("up") a device, repetitions included."""
        return (self._sender.sent_bytes if direction == self._direction else self._came_bytes)[device]

    def take_strain(self) -> dict[str, float]:
        """Device -> seconds of work since the last call that were to no use, less what useful work pays."""
        strain, self._strain_s = self._strain_s, {}
        return strain

    def take_unasked(self) -> list[str]:
        """The sender of each chunk since the last call that nobody had asked for."""
        unasked, self._unasked = self._unasked, []
        return unasked

    def _strain(self, device: str, seconds: float) -> None:
        self._strain_s[device] = self._strain_s.get(device, 0.0) + seconds

    # -- messages --

    def handle(self, route: wire.Route, payload: bytes, now_s: float) -> bool:
        """Handle a message if it concerns a blob; returns whether it does.

        Raises:
            WireError: it does, but its bytes do not match its topic.
        """
        if route.leaf not in _LEAVES:
            return False
        if route.direction == self._direction:
            return True  # an own message, returned
        if route.leaf == "get":
            self._sender.answer(route.device, wire.decode(payload, wire.Get))
            return True
        key = (route.device, route.sha256)
        if route.leaf == "chunk":
            self._take_chunk(key, route.index, payload, now_s)
        elif route.leaf == "manifest":
            self._take_manifest(key, wire.decode(payload, wire.Manifest), now_s)
        elif route.leaf == "place":
            self._take_place(key, wire.decode(payload, Place))
        elif route.leaf == "placed":
            self._streaming.placed(key, wire.decode(payload, Placed), now_s)
        else:
            missing = wire.decode(payload, wire.Missing)
            if pull := self._pulls.get(key):
                pull.take_missing(missing.reason, now_s)
        return True

    def _take_manifest(self, key: Key, manifest: wire.Manifest, now_s: float) -> None:
        pull = self._pulls.get(key)
        if pull is not None and pull.take_manifest(manifest, now_s) and not _whole(manifest):
            try:
                pull.start(self._depot.resume(manifest))
                self._strain(key[0], (manifest.size - pull.missing_bytes) * HASHED_BYTE_S)
            except StoreError as error:
                self._end(key, str(error))
            else:
                self._complete(key, pull)

    def _take_chunk(self, key: Key, index: int, payload: bytes, now_s: float) -> None:
        pull = self._pulls.get(key)
        if pull is None:
            return self._unasked.append(key[0])
        self._came_bytes[key[0]] += len(payload)
        bad = pull.bad
        if not pull.take_chunk(index, payload, now_s):
            self._strain(key[0], len(payload) * (pull.bad - bad) * HASHED_BYTE_S)
        elif pull.manifest is not None:
            try:
                if _whole(pull.manifest):
                    self._store(payload, pull.ref)
                else:
                    self._depot.write(key[1], chunks.extent(pull.manifest, index)[0], payload)
            except StoreError as error:
                self._end(key, str(error))
            else:
                self._complete(key, pull)

    def _take_place(self, key: Key, place: Place) -> None:
        if place.way == "get" and key in self._wanted:
            self._streaming.place(key, place)
        elif place.way == "put" and self._allowed(*key) and (ref := self._depot.ref(key[1])) is not None:
            self._streaming.put(key, ref, place)

    def _take_streamed(self, now_s: float) -> None:
        """Go on with blobs that have come beside the link, or have not."""
        for ended, moved in self._streaming.take_ended(now_s):
            self._came_bytes[ended.key[0]] += moved
            if ended.error is None or ended.disk:
                self._end(ended.key, ended.error)
            else:
                self._complete(ended.key, self._pulls[ended.key])

    def _complete(self, key: Key, pull: Pull) -> None:
        if pull.done and pull.manifest is not None:
            if pull.ref.size >= self._apart_bytes and not _whole(pull.manifest):
                return self._streaming.finish(key, pull)
            self._streaming.forget(key)
            try:
                if not _whole(pull.manifest):
                    self._depot.finish(pull.ref)
            except StoreError as error:
                self._end(key, str(error))
            else:
                self._end(key, None)

    def _end(self, key: Key, error: str | None) -> None:
        """Report the end; a blob that has arrived from one device has arrived for all that were to send it."""
        ref = self._wanted[key]
        if self._depot.has(ref):
            error = None
        for other in list(self._askers[key[1]]) if error is None else [key]:
            self._done.append((*other, error))
            self._forget(other)

    def _forget(self, key: Key) -> None:
        self._streaming.forget(key)
        places: tuple[dict[Key, Any], ...] = (self._wanted, self._waiting, self._pulls, self._open)
        for place in places:
            place.pop(key, None)
        self.queue.leave(*key)
        if key in (held := self._held.get(key[0], {})):
            del held[key]
            if not held:
                del self._held[key[0]]
        askers = self._askers.get(key[1], {})
        askers.pop(key, None)
        if not askers:
            self._askers.pop(key[1], None)

    # -- what is due --

    def step(self, now_s: float) -> float:
        """Publish everything due; returns when to call again."""
        self._take_streamed(now_s)
        due_s = [self._streaming.step(now_s)]
        for device, sha256 in self._streaming.ready() if self._link.connected else ():
            if self._allowed(device, sha256) and (ref := self._depot.ref(sha256)) is not None:
                self._streaming.offer(device, ref)
        if not self._wanted and not self._sender:
            return due_s[0]
        if not self._link.connected:
            return min(now_s + _OFFLINE_POLL_S, *due_s)
        try:
            chunk = chunks.chunk_for(self._link.max_payload)
        except LinkError as error:
            for key in list(self._wanted):
                self._end(key, str(error))
        else:
            self._admit(chunk, now_s)
            for key, pull in self._open.items():
                self._streaming.begin(key, pull, now_s)
            while self._request(now_s):
                self._admit(chunk, now_s)
        self._sender.step()
        due_s += [pull.due_s for pull in self._open.values() if pull.due_s > now_s]
        if self._sender:
            due_s.append(now_s + _DRAIN_POLL_S)
        return min(due_s, default=math.inf)

    def _admit(self, chunk: int, now_s: float) -> None:
        """Begin downloads while there is room; only one at a time of each blob."""
        if self._link.session != self._session:
            self._session = self._link.session
            for pull in self._pulls.values():
                pull.reconnected(chunk, now_s)
        for device in self.queue.begin(now_s):
            self._waiting |= self._held.pop(device)
        if not self._waiting or len(self._open) >= _MANY:
            return
        under_way = {sha256 for _, sha256 in self._open}
        wanted_bytes = sum(pull.ref.size for pull in self._open.values())
        for key in list(itertools.islice(self._waiting, 4 * _MANY)):
            small = len(self._open) < _MANY and wanted_bytes + self._wanted[key].size <= self._budget_bytes
            if len(self._open) >= self._max_pulls and not small:
                return
            if key[1] not in under_way:
                wanted_bytes += self._wanted[key].size
                under_way.add(key[1])
                del self._waiting[key]
                pull = self._pulls.get(key) or Pull(self._wanted[key], chunk, now_s, self._patience_s)
                pull.unpark(now_s)
                self._pulls[key] = self._open[key] = pull

    def _request(self, now_s: float) -> bool:
        """Request as many chunks as there is room for; True: a download has given its place to another."""
        outstanding_bytes, left = self._outstanding_bytes, False
        for key, pull in list(self._open.items()):
            if key not in self._open:
                continue  # another blob of its device has stalled
            before_bytes, backoff = pull.outstanding_bytes, pull.backoff
            room_bytes = max(self._budget_bytes - outstanding_bytes, 0 if outstanding_bytes else pull.chunk)
            requests = pull.requests(now_s, room_bytes)
            if pull.failed is not None:
                self._end(key, pull.failed)
                left = True
            elif pull.backoff > backoff and (stalled := self._gives_way(key)):
                self._park(stalled, now_s)
                outstanding_bytes, left = self._outstanding_bytes, True
                continue
            else:
                for request in requests:
                    self._publish(key[0], "blob/get", request)
                if requests:
                    self._open[key] = self._open.pop(key)
            outstanding_bytes += pull.outstanding_bytes - before_bytes
        return left

    @property
    def _outstanding_bytes(self) -> int:
        return sum(pull.outstanding_bytes for pull in self._open.values())

    def _gives_way(self, key: Key) -> list[Key]:
        """Blobs that others go before, now that this one's download stalls: all of its device, if they come in turn."""
        if not self._waiting and not self.queue:
            return []
        if not self.queue.has(*key):
            return [key]
        found = [(key[0], sha256) for sha256 in self.queue.of(key[0])]
        return [] if any(each in self._open and self._open[each].held for each in found) else found

    def _park(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            if (pull := self._open.pop(key, None)) is not None:
                pull.park(now_s)
            self._waiting.pop(key, None)
        if self.queue.has(*keys[0]):
            self.queue.stall(keys[0][0], now_s)
            self._held[keys[0][0]] = dict.fromkeys(keys)
        else:
            self._waiting |= dict.fromkeys(keys)

    def _publish(self, device: str, leaf: str, message: Wired) -> None:
        self._link.publish(self._topics.device(device, self._direction, leaf), wire.encode(message))


def _whole(manifest: wire.Manifest) -> bool:
    """Whether the blob comes in a single chunk: it is stored at once, without a part on disk."""
    return chunks.count(manifest) == 1
