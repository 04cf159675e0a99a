"""Tasks carried out by real child processes, those that go well and those that do not."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import plain
import pytest
from children import MODEL, Place, child, pid_of, run_request, until
from msgspec.structs import replace

from fedquilt import compression
from fedquilt.arrays import tensors
from fedquilt.core import Encoding, JobError, WorkEstimate
from fedquilt.edge_agent.devices import create_device
from fedquilt.edge_agent.task import main, memory_budget, sandbox, worker
from fedquilt.edge_agent.task.process import ChildProcess
from fedquilt.edge_agent.task.protocol import PRIVATE_FILE, DataLoaded, ProgressReport, WorkRequest, WorkResult
from fedquilt.edge_agent.task.stall_detector import StallDetector
from fedquilt.edge_agent.task.worker import ChildWorker, InlineWorker
from fedquilt.methods import fedavg

SENT_INT8 = {"1.weight#int8": 8, "1.weight#step": 4, "1.bias#int8": 2, "1.bias#step": 4}


# -- a task that goes well ------------------------------------------------------------------------
def test_a_child_trains_checks_and_says_what_it_took(place: Place) -> None:
    """8 examples to train on, 2 held out; the model's file is named by its content; the peak is above the base."""
    with child() as worker:
        order = place.order()
        outcome = run_request(worker, order)
    assert (outcome.code, outcome.reason) == ("ok", "")
    assert outcome.weight == 8.0
    assert outcome.evaluation is not None
    assert outcome.evaluation.examples == 2
    assert "loss" in outcome.metrics
    model = tensors.read_tensors(Path(order.output_folder) / outcome.bundles["model"].sha256)
    assert model.keys() == MODEL.keys()
    assert outcome.base_bytes is not None
    assert outcome.peak_bytes is not None
    assert 20 << 20 < outcome.base_bytes <= outcome.peak_bytes < 200 << 20
    assert outcome.wall_s > 0


def test_a_confined_child_does_the_same_work_and_its_layouts_are_told(place: Place) -> None:
    with child() as worker, child(sandbox.task_command(place.folder)) as confined:
        free, held = run_request(worker, place.order()), run_request(confined, place.order())
    assert (held.code, held.reason) == ("ok", "")
    assert held.bundles == free.bundles
    assert held.base_bytes is not None
    assert held.layouts == {"model": {"1.bias": "f4:2", "1.weight": "f4:2,4"}}


def test_the_same_task_gives_the_same_bits_in_a_warm_child_and_inline(place: Place) -> None:
    with child() as worker:
        first = run_request(worker, place.order())
        held = worker.resident_bytes
        second = run_request(worker, place.order())
    inline = InlineWorker(create_device("jetson-nano"))
    inline.start(place.order(), 0.0)
    assert inline.poll_events(0.0) == [DataLoaded(8)]
    (third,) = inline.poll_events(inline.next_poll_s(0.0))
    assert isinstance(third, WorkResult)
    assert first.bundles == second.bundles == third.bundles
    assert held > 0
    assert second.wall_s < first.wall_s


def test_what_a_codec_leaves_out_comes_back_with_the_next_task(place: Place) -> None:
    """The same training twice by int8: the two moves that are told and what is left make two whole ones."""
    with child() as worker:
        plain = run_request(worker, before := place.order())
        first = run_request(worker, one := place.order(wire=Encoding(codec="int8")))
        second = run_request(
            worker, two := place.order(wire=Encoding(codec="int8"), private=str(Path(one.output_folder) / PRIVATE_FILE))
        )
    moved = tensors.read_tensors(Path(before.output_folder) / plain.bundles["model"].sha256)
    told = {name: np.zeros(array.shape) for name, array in MODEL.items()}
    for order, outcome in ((one, first), (two, second)):
        sent = tensors.read_tensors(Path(order.output_folder) / outcome.bundles["model"].sha256)
        assert {name: array.nbytes for name, array in sent.items()} == SENT_INT8
        for name, array in compression.decode_bundle(order.task.wire, sent, MODEL).items():
            told[name] += array
    left = tensors.read_tensors(Path(two.output_folder) / PRIVATE_FILE)
    for name, array in moved.items():
        np.testing.assert_allclose(told[name] + left.get(f"unsent/model/{name}", 0), 2 * array, atol=1e-7)
    assert first.bundles != second.bundles
    assert not (Path(before.output_folder) / PRIVATE_FILE).exists()


def test_a_check_alone_weighs_by_the_examples_it_was_made_on(place: Place) -> None:
    with child() as worker:
        outcome = run_request(worker, place.order(actions=("check",)))
    assert (outcome.weight, outcome.bundles) == (2.0, {})


def test_examples_that_have_come_meanwhile_are_there_for_the_next_run(place: Place) -> None:
    with child() as worker:
        first = run_request(worker, place.order())
        np.savez(place.folder / "data.npz", x=np.ones((20, 4), np.float32), y=np.arange(20) % 2)
        same = run_request(worker, place.order())
        order = place.order()
        other = run_request(worker, replace(order, task=replace(order.task, job="j-2")))
    assert (first.weight, same.weight, other.weight) == (8.0, 8.0, 16.0)


def test_private_state_goes_in_and_comes_out_and_prints_go_elsewhere(place: Place) -> None:
    """A method that prints, and writes on descriptor 1 as libraries do, disturbs nothing."""
    old = place.folder / "old"
    old.write_bytes(tensors.encode_tensors({"n": np.array([4.0])}))
    with child(place.command()) as worker:
        order = place.order("chatty", private=str(old))
        outcome = run_request(worker, order)
    assert (outcome.weight, outcome.metrics) == (2.0, {"loss": 1.5})
    assert tensors.read_tensors(Path(order.output_folder) / PRIVATE_FILE)["n"] == 5.0


# -- one that does not ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "changes", "code", "part"),
    [
        ("diverged", {}, "diverged", "tensor 'w' holds 1 values that are not finite"),
        ("clumsy", {}, "model", "no bundle 'weights': choose one of model"),
        ("greedy", {}, "memory", "memory allocation failed"),
        ("chatty", {"data": {}}, "data", "add a [data] table to agent.toml"),
        ("chatty", {"data": {"path": "/nowhere.npz"}}, "data", "/nowhere.npz"),
        ("chatty", {"actions": ("check",)}, "method", "no `check` function"),
        ("chatty", {"engine": "abacus"}, "engine", "'abacus'"),
    ],
)
def test_what_goes_wrong_inside_is_an_outcome_with_a_code_and_a_sentence(
    place: Place, method: str, changes: dict[str, Any], code: str, part: str
) -> None:
    import fedquilt.edge_agent.task.main as program
    from fedquilt import methods

    place.command()
    order = place.order(method, **changes)
    methods.__path__.append(str(place.folder / "methods"))
    try:
        outcome = program.run_task(order, program.TaskExecutor())
    finally:
        methods.__path__.remove(str(place.folder / "methods"))
        sys.modules.pop(f"fedquilt.methods.{method}", None)
    assert outcome.code == code
    assert part in outcome.reason


def test_a_child_above_its_budget_is_killed_with_numbers(place: Place) -> None:
    """8 MB more at a time, until the watchdog sees it; the next task gets a fresh child."""
    with child(place.command()) as worker:
        outcome = run_request(worker, place.order("hog", budget_bytes=150 * 10**6))
        assert outcome.code == "memory"
        assert "over its budget of 150 MB" in outcome.reason
        assert outcome.peak_bytes is not None
        assert outcome.peak_bytes > 150 * 10**6
        assert worker.resident_bytes == 0
        assert run_request(worker, place.order()).code == "ok"


def test_the_daemons_group_is_divided_before_a_child_is_in_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Noted(memory_budget.MemoryLimit):
        def create_group(self) -> None:
            events.append("divided")

        def apply_limit(self, pid: int, budget_bytes: int) -> bool:
            events.append("limited")
            return True

    def started(command: Sequence[str], engine: str, *, count_task_oom_kills: bool) -> ChildProcess:
        events.append("started")
        return ChildProcess(command, engine, count_task_oom_kills=count_task_oom_kills)

    monkeypatch.setattr(worker, "ChildProcess", started)
    daemon = ChildWorker(60.0, memory_limit=Noted())
    try:
        assert run_request(daemon, place.order()).code == "ok"
    finally:
        daemon.close()
    assert events == ["divided", "started", "limited"]


def test_a_child_killed_in_the_middle_is_told_from_one_out_of_memory(place: Place) -> None:
    with child(place.command()) as worker:
        worker.start(place.order("sleepy"), 0.0)
        assert until(worker, ProgressReport).fraction == 0.25
        os.kill(pid_of(worker), signal.SIGKILL)
        outcome = until(worker, WorkResult)
    assert (outcome.code, outcome.killed_externally) == ("failed", True)
    assert "was killed from outside (SIGKILL)" in outcome.reason
    assert "(last measured at" in outcome.reason


def test_a_stopped_child_is_killed_after_a_minute_without_processor_time(place: Place) -> None:
    with child(place.command()) as worker:
        worker.start(place.order("sleepy"), 0.0)
        until(worker, ProgressReport)
        os.kill(pid_of(worker), signal.SIGSTOP)
        start_s = time.monotonic()
        assert [worker.poll_events(start_s + after_s) for after_s in (0.0, 5.0, 30.0)] == [[], [], []]
        events = [event for after_s in range(40, 100, 5) for event in worker.poll_events(start_s + after_s)]
    (outcome,) = events
    assert isinstance(outcome, WorkResult)
    assert (outcome.code, outcome.killed_externally) == ("failed", True)
    assert "made no progress for 60 s" in outcome.reason


@pytest.mark.parametrize(
    ("samples", "idle_s"),
    [
        ([(7, 0.0), (7, 5.0), (7, 10.0)], 10.0),
        ([(7, 0.0), (7, 5.0), (8, 10.0)], 0.0),
        ([(7, 0.0), (7, 500.0)], 10.0),  # the agent was stopped too
        ([(0, 0.0), *((0, 5.0 * n) for n in range(1, 13))], 60.0),
    ],
)
def test_time_without_processor_time_adds_up(samples: list[tuple[int, float]], idle_s: float) -> None:
    detector = StallDetector()
    for ticks, now_s in samples:
        detector = detector.add_sample(ticks, now_s)
    assert (detector.idle_s, detector.is_stalled) == (idle_s, idle_s == 60.0)


def test_a_task_given_up_is_killed_and_never_heard_of(place: Place) -> None:
    with child(place.command()) as worker:
        worker.start(place.order("sleepy"), 0.0)
        until(worker, ProgressReport)
        pid = pid_of(worker)
        worker.kill()
        assert not Path(f"/proc/{pid}").exists()
        assert worker.poll_events(0.0) == []
        assert run_request(worker, place.order("chatty")).code == "ok"


def test_a_child_does_not_outlive_its_daemon(place: Place) -> None:
    """kill -9 of the daemon, in the middle of a task."""
    order = place.folder / "order.json"
    order.write_bytes(msgspec.json.encode(place.order("sleepy")))
    code = f"""
import select, msgspec
from fedquilt.edge_agent.task.worker import ChildWorker
from fedquilt.edge_agent.task.protocol import WorkRequest
worker = ChildWorker(60.0, {place.command()!r})
worker.start(msgspec.json.decode(open({str(order)!r}, "rb").read(), type=WorkRequest), 0.0)
while not worker.poll_events(0.0):
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


def test_a_child_says_how_many_examples_it_has_before_it_works(place: Place) -> None:
    with child() as worker:
        worker.start(place.order(), 0.0)
        assert until(worker, DataLoaded) == DataLoaded(8)


def raised(by: Callable[[], object]) -> Exception:
    try:
        by()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_in_a_method_from_outside_names_its_file_and_line() -> None:
    broken = lambda: {}["mu"]  # noqa: E731
    outcome, line = main.failure_outcome(raised(broken)), broken.__code__.co_firstlineno
    assert (outcome.code, outcome.reason) == ("exception", f"KeyError: 'mu' ({Path(__file__).name}, line {line})")


def test_an_error_without_words_is_named_by_its_kind() -> None:
    def fail() -> None:
        raise ValueError

    assert main.failure_outcome(raised(fail)).reason.startswith(f"ValueError ({Path(__file__).name}, line ")


def test_a_method_whose_work_returns_no_answer_is_told_so(tmp_path: Path) -> None:
    method = dataclasses.replace(fedavg.METHOD, work=lambda task, site: None)  # type: ignore[arg-type,return-value]
    task = plain.task(method="prox:METHOD", work=WorkEstimate(flops=1.0))
    order = WorkRequest(
        task=task,
        device="a",
        budget_bytes=1 << 30,
        data={},
        bundles={},
        private_state=None,
        cache_folder="",
        output_folder=str(tmp_path),
    )
    with pytest.raises(JobError, match="`work` of method 'prox:METHOD' returned NoneType: return a fedquilt"):
        main.run_method(order, method, SimpleNamespace(lost_state_reason=""))  # type: ignore[arg-type]
