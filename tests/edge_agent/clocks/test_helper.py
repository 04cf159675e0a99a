"""The clock helper: who may hold, until when, and that the board always gets its own settings back.

Within one process, on a clock that the test moves; the last tests kill real ones.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest
from clock_trees import Place

from fedquilt.core import OperatingPoint, StoreError
from fedquilt.edge_agent.clocks import helper as clockd
from fedquilt.edge_agent.clocks.client import (
    HelperResponse,
    KeepaliveRequest,
    PinRequest,
    Request,
    StatusRequest,
    UnpinRequest,
)
from fedquilt.edge_agent.clocks.clock_pin import ClockPin
from fedquilt.edge_agent.clocks.helper import ClockHelper

SLOW = OperatingPoint(name="slow", cpu_hz=345.6e6, gpu_hz=318.75e6)


class Talk:
    """A client that waits for nothing but its own helper's steps."""

    def __init__(self, helper: ClockHelper, place: Place) -> None:
        self.helper = helper
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        place.lines.append(self.socket)
        self.socket.connect(str(place.socket))
        self.socket.setblocking(False)

    def raw(self, data: bytes, now_s: float = 0.0) -> bytes:
        self.socket.sendall(data)
        for _ in range(3):  # accept, hear
            self.helper.step(now_s)
        try:
            return self.socket.recv(1 << 18)
        except BlockingIOError:
            return b"nothing"

    def ask(self, request: Request, now_s: float = 0.0) -> HelperResponse:
        return msgspec.json.decode(self.raw(msgspec.json.encode(request) + b"\n", now_s), type=HelperResponse)


# -- one client -----------------------------------------------------------------------------------


def test_a_client_holds_and_lets_go(helper: ClockHelper, place: Place):
    talk = Talk(helper, place)
    assert talk.ask(PinRequest(point=SLOW)).point == SLOW
    assert place.held()
    assert talk.ask(KeepaliveRequest()) == HelperResponse()
    assert talk.ask(UnpinRequest()) == HelperResponse()
    assert place.restored()
    assert talk.ask(UnpinRequest()) == HelperResponse()
    assert talk.ask(KeepaliveRequest()).error == "this client has pinned no clocks"


def test_a_client_that_hangs_up_gives_the_clocks_back(helper: ClockHelper, place: Place):
    talk = Talk(helper, place)
    talk.ask(PinRequest(point=SLOW))
    talk.socket.close()
    helper.step(0.0)
    assert place.restored()


def test_a_silent_client_loses_the_clocks_and_reads_why(helper: ClockHelper, place: Place):
    """10 s after its last word, and not before; its next keepalive is told; it may hold again."""
    talk = Talk(helper, place)
    talk.ask(PinRequest(point=SLOW), now_s=100.0)
    talk.ask(KeepaliveRequest(), now_s=108.0)
    helper.step(118.0)
    assert place.held()
    helper.step(118.1)
    assert place.restored()
    assert talk.ask(KeepaliveRequest(), 118.2).error == "clocks unpinned: the client was silent for 10 s"
    assert talk.ask(PinRequest(point=SLOW), 118.3).point == SLOW


def test_time_that_goes_backwards_neither_lets_go_nor_holds_for_ever(helper: ClockHelper, place: Place):
    """From 100 back to 5: nothing happens; then 10 s forward count as ever."""
    talk = Talk(helper, place)
    talk.ask(PinRequest(point=SLOW), now_s=100.0)
    helper.step(5.0)
    helper.step(14.9)
    assert place.held()
    helper.step(15.1)
    assert place.restored()


def test_a_client_that_slept_with_the_board_is_heard_before_it_is_given_up(helper: ClockHelper, place: Place):
    talk = Talk(helper, place)
    talk.ask(PinRequest(point=SLOW), now_s=0.0)
    assert talk.ask(KeepaliveRequest(), now_s=60.0) == HelperResponse()
    assert place.held()


def test_a_board_that_gets_too_hot_is_let_go_and_the_client_reads_why(helper: ClockHelper, place: Place):
    talk = Talk(helper, place)
    talk.ask(PinRequest(point=SLOW), now_s=0.0)
    place.heat(90.0)
    helper.step(0.5)
    assert place.held()
    helper.step(1.0)
    assert place.restored()
    assert talk.ask(KeepaliveRequest(), 1.1).error == "clocks unpinned: the hottest zone is at 90 C, the limit is 85 C"
    assert "clocks are pinned only up to 80 C" in (talk.ask(PinRequest(point=SLOW), 1.2).error or "")


def test_stopping_the_helper_gives_the_clocks_back(place: Place):
    helper = place.helper()
    Talk(helper, place).ask(PinRequest(point=SLOW))
    helper.close()
    assert place.restored()
    assert not place.socket.exists()


def test_a_refused_hold_holds_nothing(helper: ClockHelper, place: Place):
    talk = Talk(helper, place)
    talk.ask(PinRequest(point=SLOW))
    answer = talk.ask(PinRequest(point=msgspec.structs.replace(SLOW, cpu_hz=1.0)))
    assert "has no 1e-06 MHz" in (answer.error or "")
    assert place.restored()
    assert talk.ask(KeepaliveRequest()).error == "this client has pinned no clocks"


def test_what_could_not_be_put_back_is_told_and_tried_again(place: Place):
    stuck = [False]

    def put(path: Path, value: str) -> None:
        if not (stuck[0] and path.name == "max_freq"):
            path.write_text(f"{value}\n")

    helper = ClockHelper(ClockPin(place.root, place.state, write_file=put), place.socket, place.state)
    talk = Talk(helper, place)
    talk.ask(PinRequest(point=SLOW), 0.0)
    stuck[0] = True
    assert "not restored" in (talk.ask(UnpinRequest(), 0.1).error or "")
    status = talk.ask(StatusRequest(), 0.2).status
    assert status is not None
    assert "max_freq was set to 1300500000 and is 318750000" in status.unrestored_settings[0]
    stuck[0] = False
    helper.step(5.0)
    assert place.restored()
    assert Talk(helper, place).ask(StatusRequest(), 5.1).status.unrestored_settings == ()
    helper.close()


# -- more clients, and what they say ----------------------------------------------------------------


def test_one_client_holds_at_a_time_and_anybody_may_ask(helper: ClockHelper, place: Place):
    first, second = Talk(helper, place), Talk(helper, place)
    first.ask(PinRequest(point=SLOW))
    refused = second.ask(PinRequest(point=SLOW)).error or ""
    assert refused.startswith(f"process {os.getpid()} of user {os.getuid()} has pinned the clocks at 'slow'")
    assert second.ask(UnpinRequest()) == HelperResponse()
    assert place.held()
    status = second.ask(StatusRequest()).status
    assert status is not None
    assert (status.point, status.holder) == (SLOW, f"process {os.getpid()} of user {os.getuid()}")
    first.ask(UnpinRequest())
    assert second.ask(PinRequest(point=SLOW)).point == SLOW


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"hold\n",
        b"\xff\xfe\0\n",
        b'{"type":"reboot"}\n',
        b'{"type":"hold"}\n',
        b'{"type":"hold","point":{"name":"x","cpu_hz":"fast"}}\n',
        b'{"type":"hold","point":{"name":"x","cpu_hz":-1}}\n',
        b'{"type":"hold","point":{"name":"x","cpu_hz":1e999}}\n',
        b'{"type":"hold","point":{"name":"x","volts":9}}\n',
        b'{"type":"hold","path":"/etc/passwd","point":{"name":"x"}}\n',
        b"[" * 4000 + b"\n",
        b'{"type":' + b"[" * 4000 + b"\n",
    ],
)
def test_garbage_is_refused_and_the_client_may_go_on(garbage: bytes, helper: ClockHelper, place: Place):
    talk = Talk(helper, place)
    assert msgspec.json.decode(talk.raw(garbage), type=HelperResponse).error
    assert place.restored()
    assert talk.ask(PinRequest(point=SLOW)).point == SLOW


@pytest.mark.parametrize("data", [b"x" * 5000, b"x" * 5000 + b"\n", b'{"type":"release"}' + b" " * 5000 + b"\n"])
def test_a_request_without_end_is_cut_off(data: bytes, helper: ClockHelper, place: Place):
    talk = Talk(helper, place)
    talk.ask(PinRequest(point=SLOW))
    answer = msgspec.json.decode(talk.raw(data), type=HelperResponse)
    assert answer.error == "request is longer than 4096 bytes"
    assert place.restored()
    assert talk.socket.recv(1) == b""


def test_a_request_may_come_in_pieces_and_several_at_once(helper: ClockHelper, place: Place):
    talk = Talk(helper, place)
    line = msgspec.json.encode(PinRequest(point=SLOW)) + b"\n"
    assert talk.raw(line[:10]) == b"nothing"
    answers = talk.raw(line[10:] + b'{"type":"keepalive"}\n{"type":"release"}\n').splitlines()
    assert [msgspec.json.decode(answer, type=HelperResponse).point for answer in answers] == [SLOW, None, None]
    assert place.restored()


def test_a_client_that_reads_no_answers_is_hung_up_on(helper: ClockHelper, place: Place):
    talk = Talk(helper, place)
    talk.ask(PinRequest(point=SLOW))
    for _ in range(2000):
        try:
            talk.socket.send(b'{"type":"status"}\n' * 20)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            break
        helper.step(0.0)
    for _ in range(50):
        helper.step(0.0)
    assert place.restored()


def test_too_many_clients_are_told_so(helper: ClockHelper, place: Place):
    talks = [Talk(helper, place) for _ in range(8)]
    assert all(talk.ask(KeepaliveRequest()) for talk in talks)
    ninth = Talk(helper, place)
    helper.step(0.0)
    assert b"8 clients" in ninth.socket.recv(4096)
    talks[0].socket.close()
    helper.step(0.0)
    assert Talk(helper, place).ask(UnpinRequest()) == HelperResponse()


def test_only_root_the_helpers_own_user_and_the_group_may_speak(place: Place):
    assert clockd.may_connect((1, 0, 0), None)
    assert clockd.may_connect((1, os.geteuid(), 12345), None)
    assert clockd.may_connect((1, 54321, 777), 777)
    assert not clockd.may_connect((1, 54321, 778), 777)
    assert not clockd.may_connect((1, 54321, 778), None)
    helper = place.helper(read_peer=lambda line: (1, 54321, 778))
    stranger = Talk(helper, place)
    helper.step(0.0)
    assert b"user 54321 may not set clocks" in stranger.socket.recv(4096)
    assert stranger.socket.recv(1) == b""
    helper.close()


def test_the_socket_is_for_its_owner_and_group_alone(place: Place):
    """0660, the group's if one is given, its folder passable; the journal's folder is nobody else's."""
    helper = place.helper(group=os.getgid())
    found = place.socket.stat()
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert found.st_gid == os.getgid()
    assert stat.S_IMODE(place.socket.parent.stat().st_mode) & 0o111
    assert stat.S_IMODE(place.state.stat().st_mode) == 0o700
    helper.close()


def test_a_second_helper_does_not_start(helper: ClockHelper, place: Place):
    Talk(helper, place).ask(PinRequest(point=SLOW))
    with pytest.raises(StoreError, match="another clock helper"):
        place.helper()
    assert place.held()


def test_a_helper_that_cannot_have_its_socket_says_so(place: Place):
    with pytest.raises(StoreError, match=r"socket .* cannot be created"):
        ClockHelper(ClockPin(place.root, place.state), place.root / "proc/meminfo/s", place.state)
