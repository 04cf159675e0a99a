"""A task that was taken over: what it leaves in its folders, what it writes elsewhere, which processes outlive it."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from children import FOOT, HEAD, Place, run_request
from msgspec.structs import replace
from ordinary import User
from waiting import is_running, wait_until

from fedquilt.core import BlobRef, StoreError, Update, Usage
from fedquilt.edge_agent.agent_state import AgentState
from fedquilt.edge_agent.task import sandbox
from fedquilt.edge_agent.task.protocol import PRIVATE_FILE, Event, WorkResult
from fedquilt.edge_agent.task.worker import ChildWorker
from fedquilt.host.disk import REAL

HONEST, EVIL = b"an honest result", b"another result!!"
REF = BlobRef(sha256=hashlib.sha256(HONEST).hexdigest(), size=len(HONEST))
UPDATE = Update(job="j", round=1, attempt=0, device="d", weight=1.0, bundles={"model": REF}, metrics={}, usage=Usage())

needs_landlock = pytest.mark.skipif(
    "files" not in sandbox.available_restrictions(), reason="this kernel has no Landlock"
)
needs_seccomp = pytest.mark.skipif(
    "network" not in sandbox.available_restrictions(), reason="this kernel has no seccomp"
)


# -- results --------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> AgentState:
    return AgentState(tmp_path / "home")


@pytest.mark.parametrize("how", ["an open file", "a second name"])
def test_a_result_that_the_task_changes_after_it_was_stored_stays_as_it_was(local: AgentState, how: str) -> None:
    result = local.empty_output() / REF.sha256
    result.write_bytes(HONEST)
    (result.parent / PRIVATE_FILE).write_bytes(HONEST)
    if how == "a second name":
        for name in (REF.sha256, PRIVATE_FILE):
            os.link(result.parent / name, local.task_folder / name)
        held = [os.open(local.task_folder / name, os.O_WRONLY) for name in (REF.sha256, PRIVATE_FILE)]
    else:
        held = [os.open(result.parent / name, os.O_WRONLY) for name in (REF.sha256, PRIVATE_FILE)]
    local.commit_update(UPDATE, private=REF)
    for file in held:
        os.pwrite(file, EVIL, 0)
        os.close(file)
    (kept,) = (local.home / "outbox/j@1").glob("*.private")
    assert (local.home / "blobs" / REF.sha256).read_bytes() == kept.read_bytes() == HONEST


def changed(path: Path) -> None:
    path.write_bytes(EVIL)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    (path.parent / "honest").write_bytes(HONEST)
    path.symlink_to("honest")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("leave", [changed, pipe, link, sparse])
@pytest.mark.parametrize("name", [REF.sha256, PRIVATE_FILE])
def test_a_result_that_is_no_plain_file_of_its_size_and_hash_is_refused(
    local: AgentState, leave: Callable[[Path], None], name: str
) -> None:
    out = local.empty_output()
    for each in (REF.sha256, PRIVATE_FILE):
        (out / each).write_bytes(HONEST)
    (out / name).unlink()
    leave(out / name)
    with pytest.raises(StoreError):
        local.commit_update(UPDATE, private=REF)
    assert local.load_outbox() == ({}, {})
    assert not list((local.home / "blobs").glob("*.tmp"))


def test_bytes_in_an_answer_are_stored_under_no_name_that_the_task_chooses(local: AgentState) -> None:
    answer = msgspec.json.encode(WorkResult(blobs={"../../.local/evil.pth": EVIL}))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(answer, type=Event)
    (local.empty_output() / REF.sha256).write_bytes(HONEST)
    local.commit_update(UPDATE, {"../../evil": EVIL})
    assert not list(local.home.parent.rglob("evil*"))


def test_a_result_larger_than_the_memory_that_it_was_made_in_is_refused(place: Place) -> None:
    program = place.folder / "liar.py"
    answer = WorkResult(bundles={"model": replace(REF, size=1 << 45)})
    program.write_text(f"input(); print({msgspec.json.encode(answer).decode()!r}, flush=True); input()")
    worker = ChildWorker(60.0, ["python3", str(program)])
    try:
        outcome = run_request(worker, place.order())
    finally:
        worker.close()
    assert (outcome.code, outcome.bundles) == ("failed", {})
    assert "35184372 MB exceeds the memory budget of 1074 MB" in outcome.reason


# -- folders --------------------------------------------------------------------------------------


def test_links_that_a_task_leaves_are_removed_and_not_followed(local: AgentState, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("as it was")
    out, cache = local.empty_output(), local.cache_folder("a")
    (out / "link").symlink_to(outside)
    (out / "folder").mkdir()
    (out / "folder/link").symlink_to(outside)
    (out / "gone").symlink_to(tmp_path / "nowhere")
    (cache.parent / cache.name.replace("a@", "b@")).symlink_to(outside)
    assert list(local.empty_output().iterdir()) == []
    assert not local.cache_folder("b").is_symlink()
    assert [path.name for path in cache.parent.iterdir()] == [cache.name.replace("a@", "b@")]
    assert (outside / "kept").read_text() == "as it was"


def bury(folder: str) -> list[str]:
    """Leave folders 3,000 deep, which no path reaches and no recursion leaves, and one that is shut. Then clear all."""
    top = os.open(folder, os.O_RDONLY)
    os.mkdir("deep", dir_fd=top)
    file = os.open("deep", os.O_RDONLY, dir_fd=top)
    for _ in range(3000):
        os.mkdir("a" * 100, dir_fd=file)
        file, above = os.open("a" * 100, os.O_RDONLY, dir_fd=file), file
        os.close(above)
    os.mkdir("shut", dir_fd=top)
    os.mkdir("shut/within", dir_fd=top)
    os.chmod("shut/within", 0, dir_fd=top)
    os.chmod("shut", 0, dir_fd=top)
    REAL.clear_folder(folder)
    return os.listdir(folder)


def test_folders_that_are_nested_without_end_or_shut_are_removed(user: User) -> None:
    """As an ordinary user, whom a mode of 0 keeps out."""
    assert user.does(bury, str(user.own("out"))) == []


# -- processes ------------------------------------------------------------------------------------

ESCAPES = """
import os, socket, subprocess, sys, tempfile
def work(task, site):
    done = []
    def tried(name, what):
        try:
            what()
            done.append(name)
        except OSError:
            pass
    for place in task.params["places"]:
        tried(place, lambda: open(place, "w").close())
    tried("network", lambda: socket.socket(socket.AF_INET))
    tried("setsid", os.setsid)
    tried("setpgid", lambda: os.setpgid(0, 0))
    tried("a session of its own", lambda: subprocess.run(["true"], start_new_session=True))
    tried(tempfile.gettempdir(), lambda: tempfile.mkstemp())
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return ClientResult({"w": {"w": np.ones(1)}}, float(child.pid), {name: 1.0 for name in done})
"""


@needs_landlock
@needs_seccomp
def test_a_task_writes_its_private_folders_alone_and_leaves_no_process_behind(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (place.folder / "escapes.py").write_text(HEAD + ESCAPES + FOOT)
    monkeypatch.setenv("PYTHONPATH", str(place.folder))
    home = place.folder
    places = ["blobs/x", "outbox/x", "private/x", "models/x", "scratch/x", "evil.pth", "task/x", "check/out/x"]
    for each in places:
        (home / each).parent.mkdir(parents=True, exist_ok=True)
    elsewhere = [str(home / each) for each in places] + ["/tmp/fedquilt-escaped", str(tmp_path / "x")]
    worker = ChildWorker(60.0, sandbox.task_command(home / "task"), private_folder=home / "task")
    try:
        (home / "task/out").mkdir()
        order = replace(
            place.order("escapes:METHOD"), allowed_plugins=("escapes:METHOD",), output_folder=str(home / "task/out")
        )
        order.task.params["places"] = elsewhere
        outcome = run_request(worker, order)
        assert outcome.code == "ok", outcome.reason
        wait_until(lambda: not is_running(int(outcome.weight)), "the end of what the task has started")
        assert worker.resident_bytes == 0
    finally:
        worker.close()
    temporary = home / "task" / sandbox.TEMPORARY
    assert set(outcome.metrics) == {str(temporary)}
    assert list(temporary.iterdir()) == []


def test_what_a_task_has_started_ends_where_its_own_process_ended_before(place: Place) -> None:
    program = "import os, subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); os._exit(3)"
    worker = ChildWorker(60.0, ["python3", "-c", program])
    try:
        outcome = run_request(worker, place.order())
    finally:
        worker.close()
    assert outcome.code == "failed"
    left = int(outcome.reason.rpartition(" ")[2])
    wait_until(lambda: not is_running(left), "the end of what the task has started")


# -- the agent's own process ----------------------------------------------------------------------

AGENT = """
import pathlib, sys, time
from fedquilt.edge_agent.task import memory_budget, sandbox
if sys.argv[1] == "protected":
    sandbox.protect_memory()
assert memory_budget.resident_bytes(__import__("os").getpid()) > 1 << 20
pathlib.Path(sys.argv[2]).write_text("ready")
time.sleep(600)
"""


def reached(pid: int) -> list[str]:
    """Which files of another process of the same user can be opened for writing."""
    found = []
    for name in ("mem", "oom_score_adj", "clear_refs"):
        try:
            os.close(os.open(f"/proc/{pid}/{name}", os.O_WRONLY))
            found.append(name)
        except PermissionError:
            pass
    return found


@pytest.mark.parametrize(("how", "found"), [("protected", []), ("open", ["mem", "oom_score_adj", "clear_refs"])])
def test_the_agents_memory_is_shut_to_other_processes_of_its_user(user: User, how: str, found: list[str]) -> None:
    ready = user.home / "ready"
    process = user.start(sys.executable, "-c", AGENT, how, str(ready), log=user.home / "log")
    wait_until(ready.exists, "the agent's beginning")
    seen = user.does(reached, process.pid)
    process.send_signal(signal.SIGKILL)
    assert seen == found or (how == "open" and seen == found[1:])
