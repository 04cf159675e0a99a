"""Decoders of what processes of one board send each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
from decoding import SHA, Decoder
from wired import MESSAGES

from fedquilt.core import BlobRef
from fedquilt.edge_agent.clocks import client, helper
from fedquilt.edge_agent.task import process, protocol


def every(folder: Path) -> dict[str, Decoder]:
    """The decoders by name.

    Args:
        folder: for files of theirs, which does not exist yet.
    """
    folder.mkdir()
    task = next(message for message in MESSAGES if type(message).__name__ == "Task")
    order = protocol.WorkRequest(
        task=task,
        device="a",
        budget_bytes=1,
        data={},
        bundles={},
        private_state=None,
        cache_folder="/c",
        output_folder="/o",
    )
    outcome = protocol.WorkResult(metrics={"loss": 0.5}, bundles={"model": BlobRef(sha256=SHA, size=3)}, reason="x")
    child = _child()

    def answered(payload: bytes) -> object:
        return child(payload.replace(b"\n", b" ") + b"\n")

    clock = client.ClockState(
        name="gpu", kind="gpu", listed_hz=(1e9,), low_hz=1e8, high_hz=1e9, now_hz=1e9, governor="performance"
    )
    status = client.HelperResponse(status=client.HelperStatus(clocks=(clock,), mode="MAXN"))
    held = msgspec.json.encode(client.PinRequest(point=client.OperatingPoint("p", 1e9, 1e9, 1e9)))
    served = helper.ClockHelper.__new__(helper.ClockHelper)
    served._now_s = served._last_message_s = 0.0
    served._decoder, served._holder, served._read_status = msgspec.json.Decoder(client.Request), None, lambda: None  # type: ignore[assignment,method-assign,return-value]

    return {
        "order": Decoder(
            "edge_agent/task/process.py",
            lambda payload: msgspec.json.decode(payload, type=protocol.WorkRequest),
            (msgspec.MsgspecError, UnicodeDecodeError, RecursionError),  # its own daemon's, which it trusts
            (msgspec.json.encode(order),),
        ),
        "answer of a task": Decoder(
            "edge_agent/task/process.py",
            answered,
            (),
            tuple(
                map(
                    msgspec.json.encode,
                    (outcome, protocol.EngineLoaded(9), protocol.DataLoaded(3), protocol.ProgressReport(0.5)),
                )
            ),
        ),
        "answer of the clock helper": Decoder(
            "edge_agent/clocks/client.py",
            _asked(folder),
            (client.ClockError,),
            (msgspec.json.encode(status),),
            share=0.3,
        ),
        "request to the clock helper": Decoder(
            "edge_agent/clocks/helper.py",
            lambda payload: served._handle_request(None, payload),  # type: ignore[arg-type]
            (),
            (msgspec.json.encode(client.StatusRequest()), msgspec.json.encode(client.KeepaliveRequest())),
        ),
        "hold of clocks": Decoder(
            "edge_agent/clocks/helper.py",
            lambda payload: served._decoder.decode(payload),
            (msgspec.DecodeError, ValueError, RecursionError),  # that `_answer` takes
            (held,),
        ),
    }


def _child() -> Callable[[bytes], object]:
    child = process.ChildProcess.__new__(process.ChildProcess)
    child._partial_line = child._output_tail = child._unsent = b""
    child.is_garbled, child._errors, child._invalid_lines = False, None, 0

    def read(line: bytes) -> object:
        out, into = os.pipe()
        os.set_blocking(out, False)
        os.write(into, line[: 1 << 15] if len(line) > 1 << 15 else line)
        os.close(into)
        child._output = os.fdopen(out, "rb", buffering=0)
        child._partial_line = b""
        return child.receive_events()

    return read


def _asked(folder: Path) -> Callable[[bytes], object]:
    def read(payload: bytes) -> object:
        ours, theirs = socket.socketpair()
        clocks = client.ClockClient.__new__(client.ClockClient)
        clocks._connection, clocks._socket_path = ours, folder
        clocks._decoder = msgspec.json.Decoder(client.HelperResponse)
        with ours, theirs:
            theirs.sendall(payload[: 1 << 15].replace(b"\n", b" ") + b"\n")
            return clocks._send_request(client.StatusRequest())

    return read
