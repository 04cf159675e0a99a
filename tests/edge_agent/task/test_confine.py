"""What a task's process can no longer do once it is confined, and what it still can: in a process of its own."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from children import FOOT, HEAD, Place, child, run_request
from msgspec.structs import replace

from fedquilt.edge_agent import messages
from fedquilt.edge_agent.devices.simulated_device import SimulatedDevice
from fedquilt.edge_agent.state_machine import Capabilities
from fedquilt.edge_agent.task import sandbox
from fedquilt.edge_agent.task.worker import COMMAND

PROGRAM = """
import ctypes, json, os, pathlib, socket, sys
from fedquilt.edge_agent.task import sandbox

home, outside = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
done = sandbox.apply_restrictions([home, pathlib.Path("/dev"), pathlib.Path("/proc"), home / "absent"])
refused = []

def tried(name, what):
    try:
        what()
    except OSError:
        refused.append(name)

tried("write", lambda: outside.write_text("changed"))
tried("truncate", lambda: os.truncate(outside, 0))
tried("remove", outside.unlink)
tried("make", lambda: (outside.parent / "new").mkdir())
tried("move in", lambda: os.rename(outside, home / "moved"))
for family in ("AF_INET", "AF_INET6", "AF_PACKET"):
    tried(family, lambda: socket.socket(getattr(socket, family), socket.SOCK_STREAM))
libc = ctypes.CDLL(None, use_errno=True)

def traced():
    if libc.ptrace(16, os.getppid(), 0, 0) < 0:
        raise OSError(ctypes.get_errno())

tried("trace", traced)
(home / "a").write_text("x")
(home / "b").mkdir()
os.replace(home / "a", home / "b" / "a")
open("/proc/self/oom_score_adj", "w").write("500")
open("/dev/null", "w").write("x")
socket.socket(socket.AF_UNIX).close()
print(json.dumps([list(done), refused, outside.read_text()]))
"""
FILES = ["write", "truncate", "remove", "make", "move in"]
NETWORK = ["AF_INET", "AF_INET6", "AF_PACKET", "trace"]


@pytest.mark.skipif(not sandbox.available_restrictions(), reason="this kernel has neither Landlock nor seccomp")
def test_a_confined_process_reaches_no_network_and_changes_nothing_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "outside").write_text("as it was")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "home"), str(tmp_path / "outside")]
    done, refused, outside = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert tuple(done) == sandbox.available_restrictions()
    assert outside == "as it was"
    assert set(refused) >= set(FILES if "files" in done else []) | set(NETWORK if "network" in done else [])


NOSY = """
import socket
def work(task, site):
    done = []
    for name, what in {
        "network": lambda: socket.create_connection(("127.0.0.1", task.params["port"])),
        "files": lambda: open(task.params["outside"], "w").write("changed"),
        "nothing": lambda: open(task.params["inside"], "w").write("changed"),
    }.items():
        try:
            what()
            done.append(name)
        except OSError:
            pass
    return ClientResult({"w": {"w": np.ones(1)}}, 1.0, {name: 1.0 for name in done})
"""


@pytest.mark.skipif(not sandbox.available_restrictions(), reason="this kernel has neither Landlock nor seccomp")
def test_a_task_of_an_agent_that_connects_and_writes_is_refused_both(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the process that the agent starts, by the command that it uses; without it the task does as it likes."""
    (place.folder / "nosy.py").write_text(HEAD + NOSY + FOOT)
    monkeypatch.setenv("PYTHONPATH", str(place.folder))
    elsewhere = place.folder / "outside"  # beside the private folders, and below the folder for temporary files
    done = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, command in {"as it is": sandbox.task_command(place.folder), "unconfined": COMMAND}.items():
            elsewhere.write_text("as it was")
            order = replace(place.order("nosy:METHOD"), allowed_plugins=("nosy:METHOD",))
            told = {"port": server.getsockname()[1], "outside": str(elsewhere), "inside": f"{order.output_folder}/own"}
            order.task.params.update(told)
            with child(command) as worker:
                outcome = run_request(worker, order)
            assert outcome.code == "ok", outcome.reason
            done[name] = set(outcome.metrics), elsewhere.read_text()
    given_up = set(sandbox.available_restrictions())
    assert done["as it is"] == (
        {"network", "files", "nothing"} - given_up,
        "as it was" if "files" in given_up else "changed",
    )
    assert done["unconfined"] == ({"network", "files", "nothing"}, "changed")


def test_where_the_kernel_has_neither_a_task_runs_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "_prctl", lambda *given: -1)
    assert sandbox.apply_restrictions([tmp_path]) == ()
    monkeypatch.setattr(sandbox, "_prctl", lambda *given: 0)
    monkeypatch.setattr(sandbox, "_system_call", lambda *given: -1)
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    assert sandbox.apply_restrictions([tmp_path]) == ()
    assert sandbox.available_restrictions() == ()


@pytest.mark.parametrize("machine", sandbox.CALLS)
def test_the_filter_lets_each_call_through_but_those_that_are_refused(machine: str) -> None:
    calls = sandbox.CALLS[machine]
    program = [struct.unpack("=HBBI", each) for each in sandbox._build_seccomp_program(calls)]

    def ruled(number: int, argument: int = 0, architecture: int = calls.architecture) -> int:
        data, held, at = {0: number, 4: architecture, 16: argument}, 0, 0
        while True:
            code, yes, no, value = program[at]
            if code == sandbox.RETURN:
                return int(value)
            if code == sandbox.LOAD:
                held, step = data[value], 0
            else:
                step = yes if (held == value if code == sandbox.EQUAL else held >= value) else no
            at += 1 + step

    assert ruled(0) == ruled(calls.socket, sandbox.UNIX) == ruled(calls.socket, sandbox.NETLINK) == sandbox.ALLOW
    assert ruled(calls.socket, 2) == ruled(calls.socket, 10) == ruled(calls.socket, 17) == sandbox.REFUSE
    assert {ruled(number) for number in calls.denied} == {sandbox.REFUSE}
    assert ruled(0, architecture=0x40000003) == ruled(0x40000000 + 41, 1) == sandbox.REFUSE


@pytest.mark.parametrize(
    ("confined", "told"), [(("files", "network"), "files, network"), ((), "nothing"), (None, None)]
)
def test_a_boards_profile_tells_what_its_tasks_give_up(confined: tuple[str, ...] | None, told: str | None) -> None:
    means = Capabilities(1, ("numpy",), (), sandbox_restrictions=confined)
    assert (
        messages.profile_message("a", SimulatedDevice.from_name("jetson-tx2"), means).versions.get("tasks without")
        == told
    )
