"""Checks of a rehearsal, and what is read out of a journal."""

from __future__ import annotations

import pytest

from fedquilt.core import JobError
from tests.rehearsal import checks as rehearsal
from tests.rehearsal.checks import CheckLog, CheckUnavailableError

JOURNAL = """\
Nov 22 08:39:37.810476 vm systemd[1]: Starting fedquilt-agent.service...
Nov 22 08:39:38.813694 vm python[43]: fedquilt: Permission denied: /sys/kernel/debug/bpmp/debug/clk/emc/rate
Nov 22 08:39:38.973365 vm systemd[1]: fedquilt-agent.service: Main process exited, code=exited, status=6/NOTCONFIGURED
Nov 22 08:39:49.110275 vm systemd[1]: fedquilt-agent.service: Scheduled restart job, restart counter is at 1.
Nov 22 08:40:00.109964 vm systemd[1]: fedquilt-agent.service: Scheduled restart job, restart counter is at 2.
"""


def test_a_check_that_fails_is_told_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    checks = CheckLog()
    with checks("boots") as seen:
        seen += ["systemd 252", "running"]
    assert checks.all_passed
    with checks("online"):
        raise JobError("its journal ends: no")
    with checks("a limit"):
        raise CheckUnavailableError("no cgroup v2")
    assert [(check.name, check.how, check.seen) for check in checks.done] == [
        ("boots", "ok", "systemd 252; running"),
        ("online", "failed", "its journal ends: no"),
        ("a limit", "not here", "no cgroup v2"),
    ]
    assert not checks.all_passed
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("ok        boots: systemd 252; running (")
    assert told[1].startswith("failed    online: its journal ends: no (")
    assert checks.format_summary("/x") == [
        "3 checks: 1 held; failed: online; cannot be shown on this machine: a limit",
        "journals and logs: /x",
    ]


def test_what_cannot_be_shown_here_fails_nothing_and_what_was_not_tried_does() -> None:
    checks = CheckLog()
    assert not checks.all_passed
    with checks("a limit"):
        raise CheckUnavailableError("no cgroup v2")
    assert checks.all_passed
    checks.give_up("it has not booted")
    assert not checks.all_passed
    assert "not everything was tried: it has not booted" in checks.format_summary("/x")[0]


def test_a_mistake_of_our_own_is_no_finding() -> None:
    checks = CheckLog()
    with pytest.raises(ZeroDivisionError), checks("boots"):
        _ = 1 / 0


def test_a_journal_tells_why_an_agent_ended_and_how_often_it_was_started_again() -> None:
    assert rehearsal.last_message(JOURNAL) == "fedquilt: Permission denied: /sys/kernel/debug/bpmp/debug/clk/emc/rate"
    assert rehearsal.count_restarts(JOURNAL) == 2
    assert rehearsal.last_message("") == "(it said nothing)"
