"""Tasks carried out by real child processes, some of which misbehave, and in this process on virtual time."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt import compression, tensors
from fedquilt.core import Cost, Encoding, Task, Work
from fedquilt.edge_agent.devices import make
from fedquilt.edge_agent.devices.simulated import SimulatedDevice
from fedquilt.edge_agent.task import budget, confine, worker
from fedquilt.edge_agent.task.outputs import PRIVATE
from fedquilt.edge_agent.task.process import Child
from fedquilt.edge_agent.task.protocol import Loaded, Order, Outcome, Progressed
from fedquilt.edge_agent.task.worker import COMMAND, ChildWorker, InlineWorker, Worker
from fedquilt.profiles import load

NETWORK = {"name": "mlp", "inputs": 4, "hidden": [], "classes": 2}
MODEL = {"1.weight": np.zeros((2, 4), np.float32), "1.bias": np.zeros(2, np.float32)}
SENT_INT8 = {"1.weight#int8": 8, "1.weight#step": 4, "1.bias#int8": 2, "1.bias#step": 4}
SGD = {"epochs": 1, "batch": 4, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}
LIMIT_S = 60.0

METHODS = {  # client halves that misbehave; none of their server halves is used
    "hog": """
        kept = []
        def work(task, site):
            while True:
                kept.append(np.ones(1 << 20))
        """,
    "sleepy": """
        def work(task, site):
            site.progress(0.25)
            time.sleep(600)
        """,
    "greedy": """
        def work(task, site):
            np.ones(1 << 50)
        """,
    "abort": """
        def work(task, site):
            print("something is wrong", file=sys.stderr)
            os.abort()
        """,
    "chatty": """
        def work(task, site):
            print("hello")
            os.write(1, b'{"type":"outcome"}')
            rounds = site.local.get("n", np.zeros(1)) + 1
            return Answer({"w": {"w": np.ones(1)}}, 2.0, {"loss": 1.5}, local={"n": rounds})
        """,
    "diverged": """
        def work(task, site):
            return Answer({"w": {"w": np.array([np.nan])}}, 1.0)
        """,
    "clumsy": """
        def work(task, site):
            site.load("weights")
        """,
}
HEAD = """
import os, sys, time
from dataclasses import dataclass
import numpy as np
from fedquilt.core import Answer, Method
"""
FOOT = """
@dataclass
class Nothing: pass
no = lambda *given: None
METHOD = Method(paper="", params=Nothing, state=Nothing, engines=("numpy",), init=no, send=no, work=work, check=None,
                fold=no, step=no, result=no)
"""


class Place:
    """A device's disk: data, a model, and orders on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        data = np.random.default_rng(0)
        np.savez(folder / "data.npz", x=data.random((10, 4), np.float32), y=np.arange(10) % 2)
        (folder / "model").write_bytes(tensors.encode(MODEL))
        self._orders = 0

    def order(self, method: str = "fedavg", budget_bytes: int = 1 << 30, **changes: Any) -> Order:
        self._orders += 1
        out = self.folder / f"out-{self._orders}"
        out.mkdir()
        values: dict[str, Any] = {"engine": "numpy", "actions": ("check", "work") if method == "fedavg" else ("work",)}
        values = {"work": Work(flops=1e9), **values}
        task = Task(
            job="j-1",
            round=0,
            attempt=0,
            method=method,
            params={**SGD, "network": NETWORK},
            bundles={},
            seed=7,
            deadline_s=60.0,
            **{**values, **{name: value for name, value in changes.items() if name in Task.__struct_fields__}},
        )
        return Order(
            task=task,
            device="d",
            budget_bytes=budget_bytes,
            data=changes.get("data", {"path": str(self.folder / "data.npz"), "held": 0.2}),
            bundles={"model": str(self.folder / "model")},
            private=changes.get("private"),
            cache=str(self.folder / "cache"),
            out=str(out),
        )

    def command(self) -> list[str]:
        """The child's own program, which finds the misbehaving methods too."""
        methods = self.folder / "methods"
        methods.mkdir(exist_ok=True)
        for name, work in METHODS.items():
            (methods / f"{name}.py").write_text(HEAD + textwrap.dedent(work) + FOOT)
        code = f"import fedquilt.methods as m; m.__path__.append({str(methods)!r})"
        return [sys.executable, "-c", f"{code}; from fedquilt.edge_agent.task import main; main.main()"]


class TwoSpeeds(SimulatedDevice):
    """As fast as the test says."""

    flops_per_s = 2e9

    def __init__(self) -> None:
        super().__init__(load("jetson-nano"))

    def cost(self, work: Work, measured: Cost) -> Cost:
        return Cost(duration_s=work.flops / self.flops_per_s)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextmanager
def child(command: Sequence[str] = COMMAND, warm_s: float = 60.0) -> Iterator[ChildWorker]:
    worker = ChildWorker(warm_s, command)
    try:
        yield worker
    finally:
        worker.close()


def until(worker: Worker, wanted: type) -> Any:
    """The first event of a kind; everything before it is let go."""
    limit_s = time.monotonic() + LIMIT_S
    while (now_s := time.monotonic()) < limit_s:
        for event in worker.poll(now_s):
            if isinstance(event, wanted):
                return event
        select.select(worker.fds(), [], [], max(min(worker.due_s(now_s) - now_s, 1.0), 0.0))
    raise TimeoutError(f"no {wanted.__name__} within {LIMIT_S} s")


def carried_out(worker: Worker, order: Order, now_s: float = 0.0) -> Outcome:
    worker.start(order, now_s)
    outcome = until(worker, Outcome)
    assert isinstance(outcome, Outcome)
    return outcome


# -- a task that goes well ------------------------------------------------------------------------


def test_a_child_trains_checks_and_says_what_it_took(place: Place) -> None:
    """8 examples to train on, 2 held out; the model's file is named by its content; the peak is above the base."""
    with child() as worker:
        order = place.order()
        outcome = carried_out(worker, order)
    assert (outcome.code, outcome.reason) == ("ok", "")
    assert outcome.weight == 8.0
    assert outcome.metrics["check.examples"] == 2.0
    assert "loss" in outcome.metrics
    model = tensors.read(Path(order.out) / outcome.bundles["model"].sha256)
    assert model.keys() == MODEL.keys()
    assert outcome.base_bytes is not None
    assert outcome.peak_bytes is not None
    assert 20 << 20 < outcome.base_bytes <= outcome.peak_bytes < 200 << 20
    assert outcome.wall_s > 0


def test_a_confined_child_does_the_same_work_and_its_layouts_are_told(place: Place) -> None:
    """As an agent starts it: what it gives up, no task needs."""
    with child() as worker, child(confine.command(place.folder)) as confined:
        free, held = carried_out(worker, place.order()), carried_out(confined, place.order())
    assert (held.code, held.reason) == ("ok", "")
    assert held.bundles == free.bundles
    assert held.base_bytes is not None
    assert held.layouts == {"model": {"1.bias": "f4:2", "1.weight": "f4:2,4"}}


def test_the_same_task_gives_the_same_bits_in_a_warm_child_and_inline(place: Place) -> None:
    """The second task finds its imports in place; where a task runs makes no difference."""
    with child() as worker:
        first = carried_out(worker, place.order())
        held = worker.resident_bytes
        second = carried_out(worker, place.order())
    inline = InlineWorker(make("jetson-nano"))
    inline.start(place.order(), 0.0)
    assert inline.poll(0.0) == [Loaded(8)]
    (third,) = inline.poll(inline.due_s(0.0))
    assert isinstance(third, Outcome)
    assert first.bundles == second.bundles == third.bundles
    assert held > 0
    assert second.wall_s < first.wall_s


def test_what_a_codec_leaves_out_comes_back_with_the_next_task(place: Place) -> None:
    """The same training twice by int8: the two moves that are told and what is left make two whole ones."""
    with child() as worker:
        plain = carried_out(worker, before := place.order())
        first = carried_out(worker, one := place.order(wire=Encoding(codec="int8")))
        second = carried_out(
            worker, two := place.order(wire=Encoding(codec="int8"), private=str(Path(one.out) / PRIVATE))
        )
    moved = tensors.read(Path(before.out) / plain.bundles["model"].sha256)
    told = {name: np.zeros(array.shape) for name, array in MODEL.items()}
    for order, outcome in ((one, first), (two, second)):
        sent = tensors.read(Path(order.out) / outcome.bundles["model"].sha256)
        assert {name: array.nbytes for name, array in sent.items()} == SENT_INT8
        for name, array in compression.decode(order.task.wire, sent, MODEL).items():
            told[name] += array
    left = tensors.read(Path(two.out) / PRIVATE)
    for name, array in moved.items():
        np.testing.assert_allclose(told[name] + left.get(f"unsent/model/{name}", 0), 2 * array, atol=1e-7)
    assert first.bundles != second.bundles
    assert not (Path(before.out) / PRIVATE).exists()


def test_a_check_alone_weighs_by_the_examples_it_was_made_on(place: Place) -> None:
    """Nothing is trained and nothing sent."""
    with child() as worker:
        outcome = carried_out(worker, place.order(actions=("check",)))
    assert (outcome.weight, outcome.bundles) == (2.0, {})


def test_private_state_goes_in_and_comes_out_and_prints_go_elsewhere(place: Place) -> None:
    """A method that prints, and writes on descriptor 1 as libraries do, disturbs nothing."""
    old = place.folder / "old"
    old.write_bytes(tensors.encode({"n": np.array([4.0])}))
    with child(place.command()) as worker:
        order = place.order("chatty", private=str(old))
        outcome = carried_out(worker, order)
    assert (outcome.weight, outcome.metrics) == (2.0, {"loss": 1.5})
    assert tensors.read(Path(order.out) / PRIVATE)["n"] == 5.0


# -- one that does not ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "code", "part"),
    [
        ("diverged", {}, "failed", "tensor 'w' holds 1 values that are not finite"),
        ("clumsy", {}, "model", "no bundle 'weights'; it has: model"),
        ("greedy", {}, "memory", "an allocation failed"),
        ("chatty", {"data": {}}, "data", "give its agent.toml a [data] table"),
        ("chatty", {"data": {"path": "/nowhere.npz"}}, "data", "/nowhere.npz"),
        ("chatty", {"actions": ("check",)}, "method", "no evaluation"),
        ("chatty", {"engine": "abacus"}, "engine", "'abacus'"),
    ],
)
def test_what_goes_wrong_inside_is_an_outcome_with_a_code_and_a_sentence(
    place: Place, method: str, changes: dict[str, Any], code: str, part: str
) -> None:
    """Nothing is raised, nobody dies."""
    import fedquilt.edge_agent.task.main as program
    from fedquilt import methods

    place.command()
    order = place.order(method, **changes)
    methods.__path__.append(str(place.folder / "methods"))
    try:
        outcome = program.carry_out(order, program.Bench())
    finally:
        methods.__path__.remove(str(place.folder / "methods"))
        sys.modules.pop(f"fedquilt.methods.{method}", None)
    assert outcome.code == code
    assert part in outcome.reason


def test_a_child_above_its_budget_is_killed_with_numbers(place: Place) -> None:
    """8 MB more at a time, until the watchdog sees it; the next task gets a fresh child."""
    with child(place.command()) as worker:
        outcome = carried_out(worker, place.order("hog", budget_bytes=150 * 10**6))
        assert outcome.code == "memory"
        assert "the budget is 150 MB" in outcome.reason
        assert outcome.peak_bytes is not None
        assert outcome.peak_bytes > 150 * 10**6
        assert worker.resident_bytes == 0
        assert carried_out(worker, place.order()).code == "ok"


def test_the_daemons_group_is_divided_before_a_child_is_in_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel divides no group that has processes of its own: the daemon moves out, and a child would stay in it."""
    events: list[str] = []

    class Noted(budget.Cage):
        def divide(self) -> None:
            events.append("divided")

        def limit(self, pid: int, budget_bytes: int) -> bool:
            events.append("limited")
            return True

    def started(command: Sequence[str], engine: str, *, count_own: bool) -> Child:
        events.append("started")
        return Child(command, engine, count_own=count_own)

    monkeypatch.setattr(worker, "Child", started)
    daemon = ChildWorker(60.0, cage=Noted())
    try:
        assert carried_out(daemon, place.order()).code == "ok"
    finally:
        daemon.close()
    assert events == ["divided", "started", "limited"]


def test_a_child_killed_in_the_middle_is_told_from_one_out_of_memory(place: Place) -> None:
    """SIGKILL from somebody, with no out-of-memory kill counted by the kernel."""
    with child(place.command()) as worker:
        worker.start(place.order("sleepy"), 0.0)
        assert until(worker, Progressed).fraction == 0.25
        os.kill(_pid(worker), signal.SIGKILL)
        outcome = until(worker, Outcome)
    assert (outcome.code, outcome.killed) == ("failed", True)
    assert "was killed by somebody (SIGKILL)" in outcome.reason
    assert "MB when last seen" in outcome.reason


def test_a_child_that_crashes_is_quoted(place: Place) -> None:
    """The signal by name, and its last words."""
    with child(place.command()) as worker:
        outcome = carried_out(worker, place.order("abort"))
    assert outcome.code == "failed"
    assert "died of SIGABRT" in outcome.reason
    assert "something is wrong" in outcome.reason


def test_a_task_given_up_is_killed_and_never_heard_of(place: Place) -> None:
    """And the worker takes the next."""
    with child(place.command()) as worker:
        worker.start(place.order("sleepy"), 0.0)
        until(worker, Progressed)
        pid = _pid(worker)
        worker.kill()
        assert not Path(f"/proc/{pid}").exists()
        assert worker.poll(0.0) == []
        assert carried_out(worker, place.order("chatty")).code == "ok"


def test_a_child_does_not_outlive_its_daemon(place: Place) -> None:
    """kill -9 of the daemon, in the middle of a task."""
    order = place.folder / "order.json"
    order.write_bytes(msgspec.json.encode(place.order("sleepy")))
    code = f"""
import select, msgspec
from fedquilt.edge_agent.task.worker import ChildWorker
from fedquilt.edge_agent.task.protocol import Order
worker = ChildWorker(60.0, {place.command()!r})
worker.start(msgspec.json.decode(open({str(order)!r}, "rb").read(), type=Order), 0.0)
while not worker.poll(0.0):
    select.select(worker.fds(), [], [], 1.0)
print(worker._child.pid, flush=True)
select.select([], [], [])
"""
    daemon = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert daemon.stdout is not None
    pid = os.pidfd_open(int(daemon.stdout.readline()))
    daemon.kill()
    ended, _, _ = select.select([pid], [], [], 10.0)
    os.close(pid)
    daemon.stdout.close()
    daemon.wait()
    assert ended


# -- what a child may say -------------------------------------------------------------------------

ECHO = """
import sys
for line in sys.stdin:
    sys.stdout.buffer.write({said!r} * {times})
    sys.stdout.flush()
"""
ANSWER = b'{"type":"outcome","weight":3.0}\n'


def echo(said: bytes = ANSWER, times: int = 1) -> list[str]:
    """A child that answers every order with the same bytes."""
    return script(ECHO.format(said=said, times=times))


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_garbage_between_answers_is_passed_over(place: Place) -> None:
    """Not JSON, not an answer, not UTF-8, and a null byte."""
    with child(echo(b'}{\n{"type":"outcome","weight":"heavy"}\n\xff\xfe\n\0\n' + ANSWER)) as worker:
        assert carried_out(worker, place.order()).weight == 3.0


def test_an_answer_that_nobody_waits_for_is_dropped(place: Place) -> None:
    """One order, two outcomes: the next order is not answered by the first one's."""
    with child(echo(times=2)) as worker:
        assert carried_out(worker, place.order()).weight == 3.0
        until_quiet(worker)


def until_quiet(worker: Worker) -> None:
    while select.select(worker.fds(), [], [], 0.1)[0]:
        assert worker.poll(0.0) == []


def test_a_child_that_answers_no_protocol_is_killed(place: Place) -> None:
    """Megabytes without an end of line."""
    with child(script("import sys; sys.stdin.readline()\nwhile True: sys.stdout.write('x' * 65536)")) as worker:
        outcome = carried_out(worker, place.order())
    assert outcome.code == "failed"
    assert "answers no protocol" in outcome.reason


def test_a_child_that_ends_by_itself_is_quoted(place: Place) -> None:
    """Its code, and the last thing it said."""
    with child(script("import sys; print('no such library', file=sys.stderr); sys.exit(3)")) as worker:
        outcome = carried_out(worker, place.order())
    assert outcome.code == "failed"
    assert "ended with code 3; it said: no such library" in outcome.reason


def test_a_child_that_cannot_be_started_is_an_outcome(place: Place) -> None:
    """The daemon goes on."""
    with child(["/nowhere/python"]) as worker:
        outcome = carried_out(worker, place.order())
        assert worker.poll(0.0) == []
    assert outcome.code == "failed"
    assert "cannot be started" in outcome.reason


def test_an_order_larger_than_a_pipe_arrives_whole(place: Place) -> None:
    """A thousand bundles; the daemon does not wait for the child to read them."""
    counting = """
import sys, json
for line in sys.stdin:
    count = len(json.loads(line)["bundles"])
    print(json.dumps({"type": "outcome", "weight": count}), flush=True)
"""
    order = msgspec.structs.replace(place.order(), bundles={f"{n:0200}": "/x" * 100 for n in range(1000)})
    with child(script(counting)) as worker:
        assert carried_out(worker, order).weight == 1000.0


# -- how long it is kept --------------------------------------------------------------------------


def test_an_idle_child_is_ended_when_its_time_is_up(place: Place) -> None:
    """Warm for 5 s, on the caller's clock."""
    with child(echo(), warm_s=5.0) as worker:
        worker.start(place.order(), 0.0)
        while not worker.poll(100.0):
            select.select(worker.fds(), [], [], 1.0)
        assert worker.due_s(100.0) == 105.0
        assert worker.poll(104.9) == []
        assert worker.resident_bytes > 0
        worker.poll(105.0)
        assert (worker.resident_bytes, worker.fds()) == (0, ())


def test_another_engine_gets_another_child(place: Place) -> None:
    """What one engine has imported would count against the other's budget."""
    with child(echo()) as worker:
        carried_out(worker, place.order())
        first = _pid(worker)
        carried_out(worker, place.order())
        assert _pid(worker) == first
        carried_out(worker, place.order(engine="onnx"))
        assert _pid(worker) != first


def test_inline_work_takes_as_long_as_it_would_on_the_board(place: Place) -> None:
    """1 GFLOP on a board of 2 GFLOP/s takes half a second; what is killed is not heard of."""
    worker = InlineWorker(TwoSpeeds())
    worker.start(place.order(), 50.0)
    assert worker.due_s(50.0) == 50.0
    assert worker.poll(50.0) == [Loaded(8)]
    assert worker.due_s(50.0) == 50.5
    assert worker.poll(np.nextafter(50.5, 0)) == []
    worker.kill()
    assert worker.poll(50.5) == []
    worker.start(place.order(), 60.0)
    worker.poll(60.0)
    assert [type(event) for event in worker.poll(60.5)] == [Outcome]


def test_inline_work_goes_on_at_the_pace_of_the_point_it_is_held_at(place: Place) -> None:
    """40 GFLOP: 8 s at 2 GFLOP/s are 16 of them, and the other 24 take 6 s at 4 GFLOP/s."""
    board = TwoSpeeds()
    worker = InlineWorker(board)
    worker.start(place.order(work=Work(flops=40e9)), 0.0)
    worker.poll(0.0)
    assert worker.due_s(0.0) == 1.0
    assert worker.poll(8.0) == [Progressed(0.4)]
    board.flops_per_s = 4e9
    worker.due_s(8.0)
    assert worker.poll(13.0) == [Progressed(0.9)]
    assert worker.poll(np.nextafter(14.0, 0)) == []
    assert [type(event) for event in worker.poll(14.0)] == [Outcome]


def test_inline_work_that_fails_says_so_when_its_time_is_up(place: Place) -> None:
    """Nothing is loaded and nothing progresses."""
    worker = InlineWorker(TwoSpeeds())
    worker.start(place.order(data={}), 0.0)
    assert worker.poll(0.0) == []
    (outcome,) = worker.poll(worker.due_s(0.0))
    assert isinstance(outcome, Outcome)
    assert outcome.code == "data"


def test_a_child_says_how_many_examples_it_has_before_it_works(place: Place) -> None:
    """Eight, and two held out: how much work there is follows from it."""
    with child() as worker:
        worker.start(place.order(), 0.0)
        assert until(worker, Loaded) == Loaded(8)


def _pid(worker: ChildWorker) -> int:
    assert worker._child is not None
    return worker._child.pid
