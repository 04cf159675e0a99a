"""Process of a coordinator above sites, on the virtual time of its parent process.

So its memory and its processor time are its own. Messages of the broker in memory come and go over pipes: frames of
msgpack after four bytes of their length.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from fedquilt.coordinator import limits
from fedquilt.coordinator.background_worker import LARGE_BYTES, SynchronousWorker
from fedquilt.coordinator.delivery.executor import LinkExecutor
from fedquilt.coordinator.rounds.events import RoundCommitted
from fedquilt.coordinator.server import Server
from fedquilt.coordinator.storage.store import Store
from fedquilt.transport.link import Message

FLEET: Final = "root"


class StepRequest(msgspec.Struct, array_like=True):
    now_s: float
    messages: list[tuple[str, bytes, bool]]


class StepResult(msgspec.Struct, array_like=True):
    due_s: float
    calls: list[tuple[str, tuple[Any, ...]]]  # of the link: "subscribe", "unsubscribe" or "publish", and arguments
    committed: int  # rounds so far
    finished: bool


class RelayedLink:
    """Link whose broker is in another process. A `Link`."""

    session, connected, backlog, max_payload = 1, True, 0, 1 << 20

    def __init__(self) -> None:
        self.inbox: list[Message] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def subscribe(self, filters: Sequence[str]) -> None:
        self.calls.append(("subscribe", (list(filters),)))

    def unsubscribe(self, filters: Sequence[str]) -> None:
        self.calls.append(("unsubscribe", (list(filters),)))

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, reliable: bool = True) -> None:
        self.calls.append(("publish", (topic, payload, retain)))

    def receive(self) -> list[Message]:
        messages, self.inbox = self.inbox, []
        return messages

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> None:
        """Refuse: virtual time does not wait.

        Raises:
            RuntimeError: If called, because virtual time does not wait.
        """
        raise RuntimeError("virtual time does not wait")

    def keep_alive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Do nothing: the process ends."""


def send(pipe: IO[bytes], message: msgspec.Struct) -> None:
    """Write one frame."""
    payload = msgspec.msgpack.encode(message)
    pipe.write(len(payload).to_bytes(4, "little") + payload)
    pipe.flush()


def receive(pipe: IO[bytes], kind: type[Any]) -> Any:
    head = pipe.read(4)
    return msgspec.msgpack.decode(pipe.read(int.from_bytes(head, "little")), type=kind) if len(head) == 4 else None


def main(home: str, run: str) -> int:
    link, rounds = RelayedLink(), 0

    def observe(job: Any, fact: Any) -> None:
        nonlocal rounds
        rounds += isinstance(fact, RoundCommitted)

    with Store(Path(home), durable=False) as store:
        if not store.acquire_lock():
            return 1
        executor = LinkExecutor(link, FLEET, store.depot, store.begin_epoch())
        server = Server(
            executor,
            store,
            observe,
            only=run,
            worker=SynchronousWorker(LARGE_BYTES),
            limits=limits.load_limits(store.home),
        )
        while (turn := receive(sys.stdin.buffer, StepRequest)) is not None:
            link.inbox += [Message(*each) for each in turn.messages]
            due_s = server.step(turn.now_s)
            send(sys.stdout.buffer, StepResult(due_s, link.calls, rounds, server.finished))
            link.calls = []
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
