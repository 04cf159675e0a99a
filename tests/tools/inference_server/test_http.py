"""Limits of a runner's addresses, and what they refuse."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import struct
import threading
import time
import urllib.request
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import classifiers
import numpy as np
import pytest
from runners import Running, npy, npz, png
from waiting import wait_until

from fedquilt.host.http_server import RequestRefusedError
from fedquilt.tools.operations import inference_server
from fedquilt.tools.operations.inference_server import MAX_ADDRESS_BYTES, MAX_PENDING_BYTES
from fedquilt.tools.operations.inference_server.service import MAX_BODY_BYTES, ModelService, ModelSwitcher

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def member(name: str, data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as held:
        held.writestr(name, data)
    return file.getvalue()


HEAD = np.lib.format.magic(1, 0)
SAYS = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000, 1000000), }\n"
BAD = {
    "nothing": (b"", "not a PNG, JPEG, WebP or TIFF file"),
    "garbage": (b"\x00\xff" * 5000, "not a PNG, JPEG, WebP or TIFF file"),
    "half a PNG": (png(64, 64)[:60], "cannot read the image"),
    "an image bomb": (png(60_000, 60_000, b""), "16 million pixels"),
    "a large image": (png(5000, 4000), "16 million pixels"),
    "a GIF": (b"GIF89a" + bytes(100), "not a PNG, JPEG, WebP or TIFF file"),
    "text of wrong rows": (npy(np.array(["a", "b"])), "convert it to numbers"),
    "words under x": (npz(x=np.array(["a", "b"])), "convert them to numbers"),
    "objects": (npz(x=np.array([1, 2]))[:200], "cannot read the .npz"),
    "a pickle": (b"\x93NUMPY" + b"\x80\x04." * 10, "cannot read the array"),
    "an array that says more": (HEAD + struct.pack("<H", len(SAYS)) + SAYS, "does not have 0 bytes"),
    "wrong shape": (npy(np.zeros((2, 3, 4, 5, 6), np.uint8)), "save them as (n, h, w)"),
    "a number": (npy(np.float64(3.0)), "save them as (n, h, w)"),
    "not finite": (npy(np.full((4, 4), np.nan)), "not finite"),
    "a bomb in a zip": (member("x.npy", npy(np.zeros(4 << 20))), "unpacked .npz exceeds the limit"),
    "no examples": (npz(z=np.zeros(3)), "name their array 'x_test' or 'x'"),
    "labels out of range": (
        npz(x=np.zeros((2, 4, 4), np.uint8), y=np.array([0, 7])),
        "the network predicts 2 classes (0 to 1)",
    ),
    "too many": (npz(x=np.zeros((2000, 4, 4), np.uint8)), "send 1 to 1024"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_refused_by_name(running: Running, name: str) -> None:
    body, said = BAD[name]
    status, told = running.client.post(body)
    assert (status, said in told["error"]) == (400, True), told
    assert running.client.post(npy(classifiers.image(250)))[0] == 200
    health = running.client.ask("GET", "/v1/health")[1]
    assert (health["failed"], health["refused"]) == (0, 1)


def test_a_hundred_megabytes_are_refused_before_they_are_read(running: Running) -> None:
    status, told = running.client.post(bytes(100 << 20))
    assert (status, "send at most 16777216" in told["error"]) == (413, True)
    status, told = running.connect().post(bytes(100 << 20), Expect="100-continue")
    assert status == 413
    assert not running.server._pending_bytes


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\n\r\n", 411),
        (b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n", 400),
        (
            b"POST /v1/label HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 16777217\r\n\r\n",
            413,
        ),
        (b"GET /etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"POST /v1/else HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n", 404),
        (b"DELETE /v1/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no HTTP\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\r\nhost: evil.example\r\n\r\n", 403),
        (b"POST /v1/label HTTP/1.1\r\nhost: 127.0.0.1\r\norigin: http://evil.example\r\n\r\n", 403),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 431),
        (b'POST /v1/label HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"id": 3}', 400),
    ],
)
def test_what_is_no_request_is_refused(running: Running, request_: bytes, status: int) -> None:
    with socket.create_connection(running.server.address, timeout=60) as line:
        line.sendall(request_)
        line.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: line.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode(), answer
    assert json.loads(body)["error"]
    assert running.client.ask("GET", "/v1/health")[0] == 200


def test_a_body_that_is_refused_unread_is_not_taken_for_the_next_request(running: Running) -> None:
    body = npy(classifiers.image(250))
    assert running.client.ask("POST", "/v1/else", body)[0] == 404
    assert running.client.post(body)[0] == 200
    with running.server.reserve_body_memory("127.0.0.1") as reserve:
        reserve(MAX_ADDRESS_BYTES - len(body) + 1)
        status, told = running.client.post(body)
    assert (status, told["error"]) == (503, "too many pending requests: try again later")
    assert running.client.post(body)[0] == 200


def test_bodies_of_all_addresses_together_are_limited(running: Running) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(MAX_PENDING_BYTES // MAX_ADDRESS_BYTES):
            stack.enter_context(running.server.reserve_body_memory(f"10.0.0.{number}"))(MAX_ADDRESS_BYTES)
        reserve = stack.enter_context(running.server.reserve_body_memory("10.0.0.250"))
        with pytest.raises(RequestRefusedError, match="too many pending requests"):
            reserve(1)


@pytest.mark.parametrize("arrived", [0, MAX_BODY_BYTES - 1], ids=["nothing", "all but one byte"])
def test_bodies_that_an_address_announces_and_does_not_finish_keep_nobody_else_out(
    running: Running, arrived: int
) -> None:
    header = f"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: {MAX_BODY_BYTES}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for number in (1, 2, 3, 4):
            line = stack.enter_context(socket.create_connection(running.server.address, timeout=20))
            line.sendall(header)
            line.sendall(bytes(arrived))
            if arrived and number > 2:  # the share of an address is two such bodies
                assert line.recv(12) == b"HTTP/1.1 503"
            else:
                wait_until(lambda least=number: running.server.active_requests >= least, "the request")
                wait_until(lambda least=number * arrived: running.server._pending_bytes.total() >= least, "the bytes")
        other = http.client.HTTPConnection(*running.server.address, timeout=20, source_address=("127.0.0.2", 0))
        other.request("POST", "/v1/predict", npy(classifiers.image(250)))
        assert other.getresponse().status == 200
        other.close()
    wait_until(lambda: not running.server._pending_bytes, "the memory of the bodies is free again")


def test_a_request_that_has_begun_is_answered_before_the_runner_ends(models: Path, monkeypatch: Any) -> None:
    service = ModelService(ModelSwitcher(models))
    begun, go_on, told = threading.Event(), threading.Event(), list[int]()
    network = service._models.current.network
    scores = network.compute_scores

    def slowly(x: np.ndarray) -> np.ndarray:
        begun.set()
        go_on.wait()
        return scores(x)

    def ask(url: str) -> None:
        with urllib.request.urlopen(f"{url}v1/predict", npy(classifiers.image(250))) as answer:
            told.append(answer.status)

    network.compute_scores = slowly  # type: ignore[method-assign]
    monkeypatch.setattr(
        inference_server, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: go_on.set())
    )
    with inference_server._serve_http(service, ("127.0.0.1", 0)) as url:
        thread = threading.Thread(target=ask, args=(url,))
        thread.start()
        begun.wait()
    waited = go_on.is_set()
    go_on.set()
    thread.join()
    assert (waited, told) == (True, [200])
