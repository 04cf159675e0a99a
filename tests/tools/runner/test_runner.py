"""The runner: swaps under load, what it counts and writes, and what it refuses."""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
import struct
import threading
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import classifiers

from fedquilt.core import DataError, ModelError
from fedquilt.tools.artefacts import classifier
from fedquilt.tools.runner import service as services
from fedquilt.tools.runner.http import CONNECTIONS, Server
from fedquilt.tools.runner.models import AGAIN_S, Models
from fedquilt.tools.runner.service import Service
from fedquilt.tools.runner.sources import Folder


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A board's folder: `a` is current; `b` answers the other way round."""
    place = tmp_path / "models"
    classifiers.written(place / "a" / "model.onnx")
    classifiers.written(place / "b" / "model.onnx", turned=True)
    classifiers.lead(place, "a")
    return place


class Client:
    """Asks a runner over one connection."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())

    def post(self, body: Any, **headers: str) -> tuple[int, Any]:
        return self.ask("POST", "/v1/classify", body, **headers)

    def close(self) -> None:
        self._connection.close()


class Running:
    """A runner in this process."""

    def __init__(self, models: Path, clock: Clock | None = None) -> None:
        self.models = Models(models, threads=1)
        self.service = Service(self.models, models, size=100, **({"clock": clock} if clock else {}))
        self.server = Server(self.service, "127.0.0.1", 0)
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self._clients: list[Client] = []
        self.client = self.connect()

    def connect(self) -> Client:
        self._clients.append(Client(self.server))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def running(models: Path) -> Iterator[Running]:
    found = Running(models)
    yield found
    found.close()


def npy(x: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def png(width: int, height: int, rows: bytes | None = None) -> bytes:
    """A grey PNG that says it has this size, whatever is in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packed = zlib.compress(b"\0" * (height * (width + 1)) if rows is None else rows)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


# -- swaps ----------------------------------------------------------------------------------------


def test_ten_thousand_requests_through_swaps_none_dropped_none_mixed(running: Running, models: Path) -> None:
    """Eight connections while `current` moves between two models that answer the other way round.

    Every answer is the one that the model it names gives, and both have answered.
    """
    bodies = [npy(classifiers.image(level)) for level in (10, 40, 220, 250)]
    right = {}
    for name, order in (("a", (0, 0, 1, 1)), ("b", (1, 1, 0, 0))):
        right[digest(models / name / "model.onnx")] = order
    found: list[Counter[tuple[str, int, int]]] = [Counter() for _ in range(8)]
    ended = threading.Event()

    def ask(mine: Counter[tuple[str, int, int]]) -> None:
        client = running.connect()
        for number in range(1250):
            which = number % 4
            status, told = client.post(bodies[which])
            assert status == 200, told
            mine[told["model"], which, told["class"]] += 1

    def swap() -> None:
        while not ended.is_set():
            before = running.models.now.sha256
            classifiers.lead(models, "b" if os.readlink(models / "current") == "a" else "a")
            assert running.models.look()
            assert running.models.now.sha256 != before
            seen = running.service.served
            until(lambda seen=seen: ended.is_set() or running.service.served > seen + 300, "requests between two swaps")

    errors: list[BaseException] = []

    def guarded(body: Any, *given: Any) -> None:
        try:
            body(*given)
        except BaseException as error:
            errors.append(error)

    asking = [threading.Thread(target=guarded, args=(ask, each)) for each in found]
    swapping = threading.Thread(target=guarded, args=(swap,))
    for thread in (*asking, swapping):
        thread.start()
    for thread in asking:
        thread.join()
    ended.set()
    swapping.join()
    assert not errors
    every = sum(found, Counter[tuple[str, int, int]]())
    assert sum(every.values()) == 10_000
    assert {model for model, _, _ in every} == set(right)
    assert all(right[model][which] == told for model, which, told in every)
    assert running.service.swaps >= 5
    assert running.service.health()["failed"] == 0


def digest(path: Path) -> str:
    return services.REAL.digest(path)


def test_a_request_begun_with_the_old_model_ends_with_it(running: Running, models: Path) -> None:
    """The model is exchanged while an answer is under way: it names the model that it began with."""
    old, network = running.models.now, running.models.now.network
    begun, go_on, told = threading.Event(), threading.Event(), []
    scores = network.scores

    def slowly(x: np.ndarray) -> np.ndarray:
        begun.set()
        go_on.wait()
        return scores(x)

    network.scores = slowly  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: told.append(running.connect().post(npy(classifiers.image(250)))))
    thread.start()
    begun.wait()
    classifiers.lead(models, "b")
    assert running.models.look()
    go_on.set()
    thread.join()
    ((status, answer),) = told
    assert (status, answer["model"], answer["name"]) == (200, old.sha256, "day")
    assert running.client.post(npy(classifiers.image(250)))[1]["name"] == "night"


@pytest.mark.parametrize("what", ["garbage", "labels", "nothing", "link"])
def test_a_model_that_does_not_load_leaves_the_old_one(running: Running, models: Path, what: str) -> None:
    """Health says why; when a good one comes, it is taken up and nothing is wrong any more."""
    (models / "c").mkdir()
    if what == "garbage":
        (models / "c" / "model.onnx").write_bytes(b"no network" * 100)
    if what == "labels":  # three names for two outputs
        classifiers.written(models / "c" / "model.onnx", labels=("x", "y", "z"))
    if what == "link":
        (models / "c" / "model.onnx").symlink_to("nowhere")
    old = running.models.now.sha256
    classifiers.lead(models, "c")
    assert not running.models.look()
    status, health = running.client.ask("GET", "/v1/health")
    assert status == 200
    assert health["model"] == old
    assert health["trouble"].endswith("the one before answers meanwhile")
    expected = {"garbage": "cannot be run", "labels": "there are 3 labels", "nothing": "there is no model"}
    assert expected.get(what, "there is no model") in health["trouble"]
    assert running.client.post(npy(classifiers.image(250)))[0] == 200
    classifiers.lead(models, "b")
    assert running.models.look()
    assert running.client.ask("GET", "/v1/health")[1]["trouble"] == ""


def test_a_model_that_failed_is_tried_again_later(models: Path) -> None:
    """Not at every look, as loading costs memory and time; memory may be there later."""
    clock = Clock()
    found = Models(models, threads=1, clock=clock)
    (models / "c").mkdir()
    (models / "c" / "model.onnx").write_bytes(b"x")
    classifiers.lead(models, "c")
    tried: list[Path] = []
    found._load, load = lambda path: (tried.append(path), load(path))[1], found._load  # type: ignore[method-assign]
    for _ in range(5):
        assert not found.look()
    assert len(tried) == 1
    clock.now += AGAIN_S + 1
    assert not found.look()
    assert len(tried) == 2


def test_a_file_and_a_models_folder_do_too(models: Path) -> None:
    """A file that is replaced is taken up as well."""
    path = models / "a" / "model.onnx"
    assert Models(path, threads=1).now.sha256 == Models(models / "a", threads=1).now.sha256 == digest(path)
    found = Models(path, threads=1)
    os.replace(models / "b" / "model.onnx", path)
    assert found.look()
    with pytest.raises(ModelError, match=r"there is no model .*/nothing: `fedquilt deploy` puts one there"):
        Models(models / "nothing")


# -- what is counted ------------------------------------------------------------------------------


def test_served_json_says_what_the_contract_says(running: Running, models: Path) -> None:
    """Every few seconds while requests come; the keys that the agent reads."""
    clock = Clock()
    running.service._clock = clock
    running.client.post(npy(classifiers.image(250)))
    running.client.post(b"garbage")
    running.service.step()
    told = json.loads((models / "served.json").read_text())
    assert told.keys() == {"at", "model", "served", "failed", "latency_s", "drift", "accuracy", "labelled"}
    assert (told["served"], told["failed"], told["drift"], told["accuracy"], told["at"]) == (1, 1, None, None, 1e6)
    assert told["latency_s"] > 0
    running.client.post(npy(classifiers.image(250)))
    clock.now += services.OFTEN_S / 2
    running.service.step()
    assert json.loads((models / "served.json").read_text())["served"] == 1
    clock.now += services.OFTEN_S
    running.service.step()
    assert json.loads((models / "served.json").read_text())["served"] == 2
    clock.now += services.SELDOM_S + 1
    running.service.step()
    assert json.loads((models / "served.json").read_text())["at"] == clock.now  # the agent sees that it lives


def test_drift_is_told_and_outlives_a_new_start(running: Running, models: Path) -> None:
    """The reference is on the disk: brighter images are drift for the next process too. No image is kept."""
    rng = np.random.default_rng(0)

    def ask(service: Service, low: int, high: int, count: int) -> None:
        for level in rng.integers(low, high, count):
            service.stored(classifiers.image(int(level))[None])

    ask(running.service, 40, 120, 200)
    assert running.service.standing()["drift"] == 0.0
    ask(running.service, 120, 200, 100)
    drifted = running.service.standing()["drift"]
    assert drifted > 0.5
    running.service.write()
    assert json.loads((models / "served.json").read_text())["drift"] == drifted
    again = Service(Models(models, threads=1), models, size=100)
    ask(again, 120, 200, 100)
    assert again.standing()["drift"] > 0.5
    assert again.health()["moved"].keys() >= {"mean 0", "class"}
    ask(again, 40, 120, 600)
    assert again.standing()["drift"] == 0.0
    assert {path.name for path in models.iterdir()} == {"a", "b", "current", "served.json", "reference.json"}
    (models / "reference.json").write_bytes(b'{"damaged')
    assert Service(Models(models, threads=1), models).standing()["drift"] is None


def test_a_new_model_has_a_reference_of_its_own(running: Running, models: Path) -> None:
    """What the old one began with says nothing about inputs of the new one; back again, it is compared as before."""
    for level in range(200):
        running.service.stored(classifiers.image(level % 80)[None])
    assert running.service.standing()["drift"] == 0.0
    running.service.write()
    classifiers.lead(models, "b")
    assert running.models.look()
    for _ in range(100):
        running.service.stored(classifiers.image(250)[None])
    assert running.service.standing()["drift"] is None
    running.service.write()
    classifiers.lead(models, "a")
    assert running.models.look()
    for _ in range(100):
        running.service.stored(classifiers.image(250)[None])
    assert running.service.standing()["drift"] > 0.9


def test_a_new_model_that_has_answered_nothing_has_nothing_of_the_old_one(running: Running, models: Path) -> None:
    """Drift, accuracy and labels of the one before are not told as its own, to `health` or to the agent."""
    x = np.stack([classifiers.image(level % 80) for level in range(200)])
    running.client.post(npz(x=x, y=np.ones(200, int)))
    told = running.service.standing()
    assert (told["drift"], told["accuracy"], told["labelled"]) == (0.0, 0.0, 200)
    classifiers.lead(models, "b")
    assert running.models.look()
    running.service.write()
    told = json.loads((models / "served.json").read_text())
    assert told["model"] == digest(models / "b" / "model.onnx")
    assert (told["drift"], told["accuracy"], told["labelled"], told["served"]) == (None, None, 0, 200)
    health = running.service.health()
    assert (health["accuracy"], health["swaps"]) == (None, 1)


def test_what_is_told_of_a_model_was_counted_with_it(running: Running, models: Path) -> None:
    """Between an exchange and the first answer nothing is known of the new one."""
    for _ in range(250):
        answer = running.service.stored(classifiers.image(250)[None])[0]
        running.service.label(answer.id, answer.number)
    told = running.service.standing()
    assert (told["drift"], told["accuracy"], told["labelled"]) == (0.0, 1.0, 250)
    classifiers.lead(models, "b")
    assert running.models.look()
    told = running.service.standing()
    assert told["model"] == running.models.now.sha256
    assert (told["drift"], told["accuracy"], told["labelled"]) == (None, None, 0)


def test_labels_that_arrive_later_make_an_accuracy(running: Running) -> None:
    """20 labels, a quarter of them wrong, by name and by number; each answer has one."""
    for number in range(20):
        _, told = running.client.post(npy(classifiers.image(250)))
        truth = "night" if number % 4 == 0 else 1
        label = json.dumps({"id": told["id"], "label": truth})
        status, said = running.client.ask("POST", "/v1/label", label)
        assert (status, said) == (200, {"right": number % 4 != 0})
    status, said = running.client.ask("POST", "/v1/label", label)
    assert status == 404
    assert "waits for its label" in said["error"]
    assert running.service.standing()["accuracy"] == 0.75
    assert running.service.standing()["labelled"] == 20
    assert running.client.ask("POST", "/v1/label", '{"id": "x", "label": "dusk"}')[0] == 400


def test_an_npz_is_answered_example_by_example(running: Running) -> None:
    """With labels of those that have any."""
    x = np.stack([classifiers.image(level) for level in (10, 250)] * 20)
    status, told = running.client.post(npz(x=x, y=np.array([0, 1] * 20)))
    assert status == 200
    assert [each["name"] for each in told["answers"]] == ["night", "day"] * 20
    assert running.service.standing()["accuracy"] == 1.0


def test_a_folder_that_cannot_be_written_stops_no_answer(running: Running, models: Path, monkeypatch: Any) -> None:
    """Health says it."""

    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(services.REAL, "put", full)
    running.service.step()
    assert "No space left on device" in running.service.health()["trouble"]
    assert running.client.post(npy(classifiers.image(1)))[0] == 200


# -- bad input ------------------------------------------------------------------------------------


def member(name: str, data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as held:
        held.writestr(name, data)
    return file.getvalue()


HEAD = np.lib.format.magic(1, 0)
SAYS = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000, 1000000), }\n"
BAD = {
    "nothing": (b"", "no PNG or JPEG"),
    "garbage": (b"\x00\xff" * 5000, "no PNG or JPEG"),
    "half a PNG": (png(64, 64)[:60], "cannot read the image"),
    "an image bomb": (png(60_000, 60_000, b""), "16 million pixels"),
    "a large image": (png(5000, 4000), "16 million pixels"),
    "a GIF": (b"GIF89a" + bytes(100), "no PNG or JPEG"),
    "text of wrong rows": (npy(np.array(["a", "b"])), "expected numbers"),
    "objects": (npz(x=np.array([1, 2]))[:200], "cannot read the .npz"),
    "a pickle": (b"\x93NUMPY" + b"\x80\x04." * 10, "cannot read the array"),
    "an array that says more": (HEAD + struct.pack("<H", len(SAYS)) + SAYS, "is not the 0 bytes that are there"),
    "wrong shape": (npy(np.zeros((2, 3, 4, 5, 6), np.uint8)), "expected (n, h, w)"),
    "a number": (npy(np.float64(3.0)), "expected (n, h, w)"),
    "not finite": (npy(np.full((4, 4), np.nan)), "not finite"),
    "a bomb in a zip": (member("x.npy", npy(np.zeros(4 << 20))), "unpacks to more"),
    "no examples": (npz(z=np.zeros(3)), "expected under 'x_test' or 'x'"),
    "labels out of range": (npz(x=np.zeros((2, 4, 4), np.uint8), y=np.array([0, 7])), "one of 0 to 1"),
    "too many": (npz(x=np.zeros((2000, 4, 4), np.uint8)), "1 to 1024 are answered"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_refused_by_name(running: Running, name: str) -> None:
    """400 with a sentence; the next request of the same connection is answered."""
    body, said = BAD[name]
    status, told = running.client.post(body)
    assert (status, said in told["error"]) == (400, True), told
    assert running.client.post(npy(classifiers.image(250)))[0] == 200
    assert running.service.failed == 1


def test_a_hundred_megabytes_are_refused_before_they_are_read(running: Running) -> None:
    """By what the request says; its sender sees why, whether it waits for a word or not."""
    status, told = running.client.post(bytes(100 << 20))
    assert (status, "at most 16777216 are read" in told["error"]) == (413, True)
    status, told = running.connect().post(bytes(100 << 20), Expect="100-continue")
    assert status == 413
    assert running.server._bytes == 0


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /v1/classify HTTP/1.1\r\nhost: localhost\r\n\r\n", 411),
        (b"POST /v1/classify HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST /v1/classify HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n", 411),
        (b"GET /etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"POST /v1/else HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n", 404),
        (b"DELETE /v1/health HTTP/1.1\r\nhost: localhost\r\n\r\n", 501),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no HTTP\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\r\nhost: evil.example\r\n\r\n", 403),
        (b"GET /v1/health HTTP/1.1\r\nhost: 127.0.0.1\r\norigin: http://evil.example\r\n\r\n", 403),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 414),
        (b'POST /v1/label HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"id": 3}', 400),
    ],
)
def test_what_is_no_request_is_refused(running: Running, request_: bytes, status: int) -> None:
    """Whatever comes, the answer is JSON with a sentence."""
    with socket.create_connection(running.server.server_address[:2], timeout=60) as line:
        line.sendall(request_)
        line.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: line.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode(), answer
    assert json.loads(body)["error"]
    assert running.client.ask("GET", "/v1/health")[0] == 200


def test_too_many_connections_are_refused_and_the_others_answered(running: Running) -> None:
    """64 that say nothing: the next is told to try again, and when one goes there is a place."""
    quiet = [socket.create_connection(running.server.server_address[:2], timeout=60) for _ in range(CONNECTIONS)]
    until(lambda: running.server._places._value == 0, "all places taken")
    with socket.create_connection(running.server.server_address[:2], timeout=60) as line:
        assert line.recv(1000).startswith(b"HTTP/1.1 503 ")
    for each in quiet:
        each.close()
    until(lambda: running.server._places._value > 0, "a place")
    assert running.client.post(npy(classifiers.image(1)))[0] == 200


# -- a folder -------------------------------------------------------------------------------------


def test_a_folder_is_answered_as_files_appear(running: Running, tmp_path: Path) -> None:
    """Each once, again when it is replaced; what is half written waits, and what stays damaged is told."""
    lines: list[dict[str, Any]] = []
    clock, place = Clock(), tmp_path / "in"
    place.mkdir()
    folder = Folder(running.service, place, lambda line: lines.append(json.loads(line)), clock)
    (place / "a.npy").write_bytes(npy(classifiers.image(250)))
    (place / "notes.txt").write_text("no image")
    folder.step()
    folder.step()
    assert [(each["file"], each["name"]) for each in lines] == [("a.npy", "day")]
    half = place / "b.png"
    half.write_bytes(png(4, 4)[:40])
    clock.now = half.stat().st_mtime
    folder.step()
    assert len(lines) == 1
    half.write_bytes(png(4, 4))
    folder.step()
    assert lines[-1]["file"] == "b.png"
    assert lines[-1]["name"] == "night"
    (place / "c.png").write_bytes(b"no image")
    clock.now = time.time() + 100
    folder.step()
    folder.step()
    assert len(lines) == 3
    assert "no PNG or JPEG" in lines[-1]["error"]
    os.replace(place / "a.npy", place / "d.npy")
    folder.step()
    assert lines[-1]["file"] == "d.npy"
    with pytest.raises(DataError, match="is no folder"):
        Folder(running.service, tmp_path / "absent", print)


def test_two_threads_never_read_a_header_at_once(monkeypatch: Any) -> None:
    """CPython 3.11 fails then now and again, "AST constructor recursion depth mismatch": good requests were refused."""
    read, ends = np.lib.format.read_array_header_1_0, list[bool]()
    entered, second = threading.Event(), threading.Thread(target=lambda: classifier.array(npy(np.zeros(2))))

    def header(*args: Any, **options: Any) -> Any:
        if not entered.is_set():  # the first: what a second one does meanwhile is seen
            entered.set()
            second.start()
            second.join(0.2)
            ends.append(second.is_alive())
        return read(*args, **options)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", header)
    classifier.array(npy(np.zeros(2)))
    second.join()
    assert ends == [True]


def test_arrays_are_read_as_numpy_reads_them() -> None:
    """Any order and size of numbers, and what an .npz of numpy holds."""
    for x in (
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.zeros((0, 3)),
    ):
        assert np.array_equal(classifier.array(npy(x)), x)
    held = classifier.arrays(npz(x=np.arange(3), y=np.arange(2)), 10_000)
    assert {name: each.tolist() for name, each in held.items()} == {"x": [0, 1, 2], "y": [0, 1]}
