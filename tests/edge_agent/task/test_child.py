"""What a child may say, and how long it is kept."""

from __future__ import annotations

import select
import sys

import msgspec
import pytest
from children import Place, child, pid_of, run_request
from waiting import wait_until

from fedquilt.edge_agent.task.worker import TaskWorker

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
        assert run_request(worker, place.order()).weight == 3.0


def test_an_answer_that_nobody_waits_for_is_dropped(place: Place) -> None:
    with child(echo(times=2)) as worker:
        assert run_request(worker, place.order()).weight == 3.0
        until_quiet(worker)


def until_quiet(worker: TaskWorker) -> None:
    while select.select(worker.fds(), [], [], 0.1)[0]:
        assert worker.poll_events(0.0) == []


@pytest.mark.parametrize(("said", "logged"), [("x", 0), ("\\n", 1)])
def test_a_child_that_answers_no_protocol_is_killed(
    place: Place, caplog: pytest.LogCaptureFixture, said: str, logged: int
) -> None:
    endless = f"import sys; sys.stdin.readline()\nwhile True: sys.stdout.write('{said}' * 65536)"
    with child(script(endless)) as worker:
        outcome = run_request(worker, place.order())
    assert outcome.code == "failed"
    assert "wrote invalid output" in outcome.reason
    assert len(caplog.records) == logged


def test_an_idle_child_that_writes_lines_without_end_is_killed(place: Place) -> None:
    endless = (
        f"import sys; sys.stdin.readline(); sys.stdout.write({ANSWER.decode()!r})\nwhile True: sys.stdout.write('x\\n')"
    )
    with child(script(endless)) as worker:
        run_request(worker, place.order())
        wait_until(lambda: worker.poll_events(0.0) == [] and not worker.fds(), "the end of the child")


def test_a_child_that_ends_by_itself_is_quoted(place: Place) -> None:
    with child(script("import sys; print('no such library', file=sys.stderr); sys.exit(3)")) as worker:
        outcome = run_request(worker, place.order())
    assert outcome.code == "failed"
    assert "ended with exit code 3; last output: no such library" in outcome.reason


def test_a_child_that_cannot_be_started_is_an_outcome(place: Place) -> None:
    with child(["/nowhere/python"]) as worker:
        outcome = run_request(worker, place.order())
        assert worker.poll_events(0.0) == []
    assert outcome.code == "failed"
    assert "cannot be started" in outcome.reason


def test_an_order_larger_than_a_pipe_arrives_whole(place: Place) -> None:
    counting = """
import sys, json
for line in sys.stdin:
    count = len(json.loads(line)["bundles"])
    print(json.dumps({"type": "outcome", "weight": count}), flush=True)
"""
    order = msgspec.structs.replace(place.order(), bundles={f"{n:0200}": "/x" * 100 for n in range(1000)})
    with child(script(counting)) as worker:
        assert run_request(worker, order).weight == 1000.0


# -- how long it is kept --------------------------------------------------------------------------
def test_an_idle_child_is_ended_when_its_time_is_up(place: Place) -> None:
    """Warm for 5 s, on the caller's clock."""
    with child(echo(), warm_s=5.0) as worker:
        worker.start(place.order(), 0.0)
        while not worker.poll_events(100.0):
            select.select(worker.fds(), [], [], 1.0)
        assert worker.next_poll_s(100.0) == 105.0
        assert worker.poll_events(104.9) == []
        assert worker.resident_bytes > 0
        worker.poll_events(105.0)
        assert (worker.resident_bytes, worker.fds()) == (0, ())


def test_another_engine_gets_another_child(place: Place) -> None:
    with child(echo()) as worker:
        run_request(worker, place.order())
        first = pid_of(worker)
        run_request(worker, place.order())
        assert pid_of(worker) == first
        run_request(worker, place.order(engine="onnx"))
        assert pid_of(worker) != first
