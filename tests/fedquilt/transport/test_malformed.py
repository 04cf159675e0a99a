"""Messages that are none: told at first, then counted."""

from fedquilt.core import WireError
from fedquilt.transport.link import (
    COUNT_INTERVAL_S,
    MAX_BRANCHES,
    MAX_LOGGED_PER_BRANCH,
    OTHER_BRANCHES,
    MalformedMessages,
)

ERROR = WireError("not a fedquilt message")


def test_the_first_are_told_and_the_rest_is_a_number():
    found = MalformedMessages()
    told = [found.count_message(f"fq/1/f/dev/a/up/{n}", ERROR, False, 0.0) for n in range(100)]
    assert [line is not None for line in told] == [n < MAX_LOGGED_PER_BRANCH for n in range(100)]
    assert str(told[0]) == "dropped a message on fq/1/f/dev/a/up/0: not a fedquilt message"
    assert "only counted" in str(told[MAX_LOGGED_PER_BRANCH - 1])
    assert found.count_message("fq/1/f/dev/b/up/x", ERROR, False, 0.0) is not None
    assert found.take_due_lines(COUNT_INTERVAL_S - 1) == []
    assert found.take_due_lines(COUNT_INTERVAL_S) == [
        "dropped 97 more messages under fq/1/f/dev/a/up; the last: fq/1/f/dev/a/up/99: not a fedquilt message"
    ]
    assert found.take_due_lines(COUNT_INTERVAL_S + 1) == []
    assert found.dropped == 101


def test_a_branch_that_has_been_quiet_is_told_anew():
    found = MalformedMessages()
    for _ in range(MAX_LOGGED_PER_BRANCH + 1):
        found.count_message("fq/1/f/dev/a/up/x", ERROR, False, 0.0)
    assert len(found.take_due_lines(COUNT_INTERVAL_S)) == 1
    assert found.count_message("fq/1/f/dev/a/up/x", ERROR, False, COUNT_INTERVAL_S + 1) is None  # still at it
    assert len(found.take_due_lines(2 * COUNT_INTERVAL_S + 1)) == 1
    assert found.take_due_lines(3 * COUNT_INTERVAL_S + 1) == []
    assert found.count_message("fq/1/f/dev/a/up/x", ERROR, False, 3 * COUNT_INTERVAL_S + 2) is not None


def test_what_the_broker_keeps_is_told_with_the_command_that_clears_it():
    said = MalformedMessages().count_message("fq/1/f/coord/state", ERROR, True, 0.0)
    assert str(said).endswith(
        "the broker retains the message until you clear it: mosquitto_pub -r -n -t 'fq/1/f/coord/state'"
    )


def test_names_that_somebody_invents_fill_neither_log_nor_memory():
    found = MalformedMessages()
    told = [found.count_message(f"fq/1/f/dev/d{n}/up/x", ERROR, False, 0.0) for n in range(10_000)]
    assert sum(line is not None for line in told) == MAX_BRANCHES + MAX_LOGGED_PER_BRANCH
    assert OTHER_BRANCHES in found.take_due_lines(COUNT_INTERVAL_S)[0]
