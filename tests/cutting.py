"""A TCP relay that cuts connections, changes bytes or lets nobody through; and a server of canned answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

Change = Callable[[int, bytes], bytes]  # offset in a connection, bytes -> the bytes that pass instead


class Listener:
    """A port of 127.0.0.1, whose connections go to `serve` one after the other until `close`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.serve(self._listener.accept()[0])

    def serve(self, sock: socket.socket) -> None:
        raise NotImplementedError

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else it goes on listening while `accept` waits
        self._listener.close()


class Relay(Listener):
    """Relays to a port, from one of its own.

    Args:
        port: of 127.0.0.1.
        most: bytes that pass over the connection with this number, from 0, in the larger direction; None: all.
        change: what becomes of bytes from the server; it is given their offset in the connection.
        sent: likewise for bytes from the client, of the connection with this number.
    """

    def __init__(
        self,
        port: int,
        most: Callable[[int], int | None] = lambda number: None,
        change: Change = lambda offset, data: data,
        sent: Callable[[int], Change] = lambda number: lambda offset, data: data,
    ) -> None:
        self.target, self.most, self.change, self.sent = port, most, change, sent
        self.connections = 0
        self.closed = False  # whether connections are refused from now on
        super().__init__()

    def serve(self, sock: socket.socket) -> None:
        if self.closed:
            return sock.close()
        number, self.connections = self.connections, self.connections + 1
        threading.Thread(target=self._relay, args=(sock, self.most(number), self.sent(number)), daemon=True).start()

    def _relay(self, sock: socket.socket, most: int | None, sent: Change) -> None:
        with sock, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.target)) as other:
            back = threading.Thread(target=self._pump, args=(other, sock, most, self.change), daemon=True)
            back.start()
            self._pump(sock, other, most, sent)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket, most: int | None, change: Change) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(16 * 1024 if most is None else min(16 * 1024, most - passed)):
                sink.sendall(change(passed, data))
                passed += len(data)
                if passed == most:
                    break
            if passed == most:
                for sock in (source, sink):
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
            else:
                sink.shutdown(socket.SHUT_WR)


class Canned(Listener):
    """A server that gives each connection the same answer, whatever is asked."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.asked: list[bytes] = []
        super().__init__()

    def serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            self.asked.append(sock.recv(8 * 1024))
            sock.sendall(self.answer)
