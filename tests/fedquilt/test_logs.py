"""Logs as JSON."""

import io
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from stored_job import JOB

from fedquilt.coordinator.rounds.events import CohortSelected, JobEnded, TaskDeclined
from fedquilt.coordinator.rounds.job_state import EndedJob, JobConstants, JobState
from fedquilt.coordinator.views.terminal import JsonConsole
from fedquilt.coordinator.views.wait_reasons import WaitReason
from fedquilt.host import logs


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(self.format(record)))

    monkeypatch.setattr(logging.getLogger(), "handlers", [Handler()])
    logs.use_json_logs(device="orin-07")
    return found


def test_a_line_has_the_ids_that_its_call_names(lines):
    log = logging.getLogger("fedquilt.test")
    log.warning("%s,\nround %d", "j-1", 3, extra=logs.log_ids(run="j-1", round=3, device=None))
    assert [lines[0][key] for key in ("level", "message", "run", "round", "device")] == [
        "WARNING",
        "j-1,\nround 3",
        "j-1",
        4,
        "orin-07",
    ]
    assert lines[0]["at"].endswith("+00:00")


def test_text_that_is_no_utf_8_makes_a_line_too(lines):
    record = logging.makeLogRecord({"msg": "odd \udcff", **logs.log_ids(device="pi-01", round=3)})
    told = json.loads(logging.getLogger().handlers[0].format(record))
    assert [told[key] for key in ("message", "device", "round")] == [r"odd \udcff", "pi-01", 4]


def test_an_error_has_its_traceback(lines):
    try:
        raise ValueError("no number")
    except ValueError:
        logging.getLogger("fedquilt.test").exception("failed")
    assert lines[0]["error"].endswith("ValueError: no number")


def test_a_coordinators_facts_are_lines(lines):
    job = SimpleNamespace(id="digits-1", job_state=JobState(JobConstants.from_job(JOB)))
    console = JsonConsole()
    facts = [CohortSelected(3, 0, ("a",)), TaskDeclined(3, "a", "memory", "12 MB short"), JobEnded("failed", "why")]
    for fact in facts:
        console.observe(job, fact)
    console.report("connected to the broker")
    told = [tuple(line.get(key) for key in ("level", "fact", "run", "round")) for line in lines]
    assert told == [
        ("INFO", "CohortSelected", "digits-1", 4),
        ("INFO", "TaskDeclined", "digits-1", 4),
        ("ERROR", "JobEnded", "digits-1", None),
        ("INFO", None, None, None),
    ]
    assert (lines[1]["device"], lines[1]["message"]) == ("a", "round 4: a declined (memory): 12 MB short")


def test_a_coordinator_with_logs_as_json_draws_nothing_on_a_terminal(lines, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", shown := Terminal())
    console = JsonConsole()
    job = EndedJob("digits-1", JOB, JobState(JobConstants.from_job(JOB)))
    for now_s in (0.0, 60.0):
        console.report_wait(job, WaitReason("more boards", "", "boards"), now_s)
        console.refresh()
    assert (shown.getvalue(), len(lines)) == ("", 1)
    assert lines[0]["message"].startswith("digits-1: waiting for more boards")
