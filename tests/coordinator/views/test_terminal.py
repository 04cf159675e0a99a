"""What a terminal is told while nothing can be done."""

import io
import time
from collections.abc import Sequence

import msgspec
import plain
import pytest
from evaluations import of_classes, of_numbers, total
from stored_job import JOB

from fedquilt.console import progress
from fedquilt.coordinator.fleet.device_status import DeviceStatus
from fedquilt.coordinator.rounds import selection
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    RoundRetried,
    TaskDeclined,
    UpdateAccepted,
    UpdateRejected,
)
from fedquilt.coordinator.rounds.job_state import EndedJob, JobConstants, JobState, apply_event
from fedquilt.coordinator.settings import CohortSettings
from fedquilt.coordinator.views import event_messages, run_summary, wait_reasons
from fedquilt.coordinator.views.run_summary import RoundSummary, RunSummary
from fedquilt.coordinator.views.terminal import (
    UNCHANGED_WAIT_REPORT_S,
    VIRTUAL_FORMAT,
    WAIT_REPORT_S,
    WORK_REPORT_S,
    ConnectionReporter,
    Console,
    WaitReporter,
)
from fedquilt.coordinator.views.wait_reasons import WaitReason
from fedquilt.core import BlobRef, Usage

REF = BlobRef(sha256="a" * 64, size=1)
NOW = time.mktime((2026, 11, 26, 14, 3, 28, 0, 0, -1))


def begun(cohort: CohortSettings, rounds: int = 2, check_every: int = 0) -> JobState:
    return apply_event(JobState(JobConstants(0, rounds, cohort, check_every)), JobStarted(REF), 0.0)


def formatted(state: JobState, facts: Sequence[AnyEvent], seen: int = 0) -> list[list[str]]:
    """Return the text of events after a state. A console sees those from number `seen` on."""
    after, told = RunSummary(state), []
    for number, fact in enumerate(facts):
        state = apply_event(state, fact, 1.0)
        if number >= seen:
            before, after = after, after.with_event(fact, 1.0, state)
            told.append(event_messages.format_event(before, fact, after))
    return told


def answer(device: str, round: int = 0) -> UpdateAccepted:
    update = plain.update(round=round, device=device, usage=Usage(wall_s=1.0))
    return UpdateAccepted(round, update)


def test_a_wait_is_told_when_it_begins_or_changes_and_else_rarely():
    waiting, a, b = WaitReporter(), WaitReason("a", "a", "lost"), WaitReason("b", "b", "boards")
    assert waiting.line_due(a, 0.0) is None
    assert waiting.line_due(a, WAIT_REPORT_S) == "waiting for a"
    assert waiting.line_due(a._replace(text="a, 100 s later"), WAIT_REPORT_S + 100) is None
    assert waiting.line_due(b, WAIT_REPORT_S + 101) == "waiting for b"
    assert waiting.line_due(a, WAIT_REPORT_S + 102) is None  # it comes and goes: not at each turn
    assert waiting.line_due(b, WAIT_REPORT_S + 101 + UNCHANGED_WAIT_REPORT_S) == "waiting for b"
    assert waiting.line_due(None, 2000.0) is None
    assert waiting.line_due(b, 2001.0) is None
    assert waiting.line_due(b, 2001.0 + WAIT_REPORT_S) == "waiting for b"


def test_a_wait_for_devices_at_work_is_told_later():
    waiting, slow = WaitReporter(), WaitReason("c, at work", "c", "working")
    assert waiting.line_due(slow, 0.0) is None
    assert waiting.line_due(slow, WORK_REPORT_S - 1) is None
    assert waiting.line_due(slow, WORK_REPORT_S) == "waiting for c, at work"


def test_the_loss_of_the_broker_and_its_return_are_told_once():
    contact = ConnectionReporter()
    told = [contact.line_due(*now) for now in ((True, 1), (True, 1), (False, 1), (False, 1), (True, 2), (True, 3))]
    lost, again = ("lost the connection to the broker: trying to reconnect", "reconnected to the broker")
    assert told == [None, None, lost, None, again, again]
    daemon = ConnectionReporter()
    assert [daemon.line_due(*now) for now in ((False, 0), (True, 1), (True, 1))] == [
        None,
        "connected to the broker",
        None,
    ]


def test_a_wait_while_the_broker_is_away_is_not_told_as_a_lack_of_boards(capsys):
    class Link:
        connected, session = False, 0

    class Registry:
        def usable_engines(self, engines, now_s):
            return {}

    class Job:
        id, engines, job_state = "digits-1", ("torch",), begun(CohortSettings())

    class Server:
        registry = Registry()

        def active_jobs(self):
            return [Job()]

        def devices_of_other_jobs(self, job):
            return frozenset()

        def wall_clock_state(self, job, now_s, now):
            return Job.job_state, now

    now_s = iter((0.0, 0.0, WAIT_REPORT_S, WAIT_REPORT_S, 100.0, 100.0, 100.0))
    console = Console(clock=lambda: next(now_s))
    for link in (Link(), Link()):
        console.report_connection(link)
        console.report_waits(Server())
    told = capsys.readouterr().out
    assert "waiting for its broker, which is unreachable" in told
    assert "fedquilt doctor" in told
    assert "start more" not in told


def test_too_few_devices_for_a_first_round_are_told_with_how_many_are_wanted():
    state = begun(CohortSettings(size=3, min_devices=3))
    wait = wait_reasons.find_wait(state, ["torch", "numpy"], ["a"])
    assert (wait.text, wait.kind) == ("devices that run torch or numpy: 1 online, at least 3 needed", "boards")


def test_devices_without_a_plug_in_are_named_with_the_fix_and_nobody_is_told_to_start_more():
    codes = {"plugin mine-fl|1.0 aaaa|": ("b",), "plugin mine-fl|1.0 aaaa|1.1 bbbb": ("c",)}
    state = apply_event(begun(CohortSettings(size=2, min_devices=2)), EligibilityRecorded(0, ("a",), codes), 1.0)
    for online in (["a", "b", "c"], ["a"]):  # the coordinator knows those online, the log those that can run the job
        wait = wait_reasons.find_wait(state, ["torch"], online)
        assert wait.kind == "plugins"
        assert wait.text == (
            "devices that run torch: 1 online, at least 2 needed; not b, which lacks package mine-fl 1.0 "
            "aaaa: install it on the device, and allow it in agent.toml; not c, which has package mine-fl 1.1 "
            "bbbb, and the job needs 1.0 aaaa: install that version on the device"
        )
    few = apply_event(begun(CohortSettings(size=4, min_devices=4)), EligibilityRecorded(0, ("a",), codes), 1.0)
    assert wait_reasons.find_wait(few, ["torch"], ["a"]).kind == "boards"  # a fourth device is needed as well


def test_too_few_devices_for_a_quorum_are_told_with_what_is_there():
    state = apply_event(begun(CohortSettings(size=4, quorum=0.75)), CohortSelected(0, 0, ("a", "b")), 1.0)
    assert wait_reasons.find_wait(state, ["torch"], ["a", "b"]) is None  # they are at it
    for device in "ab":
        state = apply_event(state, answer(device), 2.0)
    wait = wait_reasons.find_wait(state, ["torch"], ["a", "b"], now=NOW, deadline=NOW + 512.0)
    assert wait.text == (
        "devices that run torch: 2 online, 2 of 4 updates received, a quorum is 3, "
        f"until {time.strftime('%H:%M', time.localtime(NOW + 512.0))} (512 s)"
    )


def test_a_device_that_was_asked_and_has_gone_is_named():
    names = tuple("abcdefg")
    state = apply_event(begun(CohortSettings()), CohortSelected(0, 0, names), 1.0)

    def told(able, busy=""):
        wait = wait_reasons.find_wait(state, ["torch"], able, frozenset(busy))
        return None if wait is None else wait.text

    assert told("") == "a, b, c, d, e and 2 more, offline"
    assert told("f", "efg") == "a, b, c, d, offline; e, f, g, working for other jobs"
    assert told("df", "efg") == "a, b, c, offline; e, f, g, working for other jobs"
    assert told("abcdefg") is None


def test_a_device_that_a_round_waits_for_is_named_with_since_when_and_until_when():
    state = apply_event(begun(CohortSettings()), CohortSelected(0, 0, ("d1", "d2", "d3")), NOW - 88.0)
    state = apply_event(apply_event(state, answer("d1"), NOW - 60.0), answer("d2"), NOW - 50.0)
    at = time.strftime("%H:%M", time.localtime(NOW - 45.0))
    until = time.strftime("%H:%M", time.localtime(NOW + 512.0))

    def told(**board):
        known = {"d3": DeviceStatus("d3", **board)}
        wait = wait_reasons.find_wait(state, ["torch"], ["d1", "d2", "d3"], frozenset(), known.get, NOW, NOW + 512.0)
        return wait.text, wait.kind

    assert told(online=False, since=NOW - 45.0) == (f"d3, offline since {at}, until {until} (512 s)", "lost")
    assert told(silent=True, since=NOW - 45.0) == (f"d3, silent since {at}, until {until} (512 s)", "lost")
    quiet = told(online=True, quiet=True, seen=NOW - 40.0)
    assert quiet == (f"d3, last message 40 s ago, until {until} (512 s)", "lost")
    assert told(online=True) == (f"d3, at work for 88 s, until {until} (512 s)", "working")
    assert told(online=False, since=NOW - 600.0)[0].endswith("; `fedquilt devices --remove d3` if it does not return")


def test_a_closed_round_names_the_devices_without_an_update():
    facts = [CohortSelected(0, 0, ("a", "b", "c")), answer("a"), RoundClosed(0)]
    (line,) = formatted(begun(CohortSettings()), facts)[2]
    assert line == "round 1: closed to further updates; no update from b, c"


@pytest.mark.parametrize("finished", [True, False])
def test_the_evaluation_after_the_last_round_is_not_told_as_a_round(finished):
    state = begun(CohortSettings(), rounds=5 if finished else 1, check_every=1)
    facts = [CohortSelected(0, 0, ("a",)), answer("a"), RoundClosed(0), RoundCommitted(0, REF, finished, {})]
    facts += [
        CohortSelected(1, 0, ("a",)),
        answer("a", 1),
        RoundClosed(1),
        RoundCommitted(1, REF, False, {}, evaluation=of_classes(0.5)),
    ]
    told = [lines[0] for lines in formatted(state, facts)]
    assert told[:2] == ["round 1: cohort a", "round 1: update from a: 1.00 s, 0 B down, 0 B up"]
    assert told[2:5] == [
        "round 1: closed to further updates",
        "round 1: updates aggregated (1 of 1 devices)",
        "final evaluation: cohort a",
    ]
    assert told[7].startswith("final evaluation: accuracy 50.0 % on 10 held-out examples, ")
    assert told[7].endswith(", loss 0.5, 1 of 1 devices")


def test_a_round_that_gathers_statistics_for_the_last_evaluation_is_told_as_a_round():
    plan = JobConstants(0, 1, CohortSettings(), 1)
    state, facts = apply_event(JobState(plan), JobStarted(REF, has_evaluation_rounds=True), 0.0), []
    for round, settled in enumerate((True, False, True, False)):
        facts += [CohortSelected(round, 0, ("a",)), answer("a", round), RoundClosed(round)]
        facts.append(RoundCommitted(round, REF, False, {}, is_evaluation_round=settled))
    told = [lines[0] for lines in formatted(state, facts)]
    assert told[8] == "round 3: cohort a"
    assert told[11] == "round 3: statistics for the evaluation gathered (1 of 1 devices)"
    assert told[12] == "final evaluation: cohort a"


def test_progress_counts_rounds_of_work_alone():
    state, told = (
        apply_event(
            JobState(JobConstants(0, 2, CohortSettings(), 1)), JobStarted(REF, has_evaluation_rounds=True), 0.0
        ),
        list[list[str]](),
    )
    for round, settled in enumerate((True, False, True, False, True, False)):
        state = apply_event(state, CohortSelected(round, 0, ("a", "b")), 1.0)
        state = apply_event(state, answer("a", round), 1.0)
        told.append(event_messages.format_status(RunSummary(state), state))
        for fact in (RoundClosed(round), RoundCommitted(round, REF, False, {}, is_evaluation_round=settled)):
            state = apply_event(state, fact, 1.0)
    assert told[0] == ["round 1 of 2", "0 B so far", "1 of 2 devices answered, 1 at work"]
    assert [lines[0] for lines in told[3:]] == [
        "round 2 of 2",
        "statistics for the final evaluation",
        "final evaluation",
    ]


@pytest.mark.parametrize(
    ("facts", "attempt", "said"),
    [
        (
            [answer("a"), TaskDeclined(0, "b", "data", "none"), TaskDeclined(0, "c", "memory", "too big")],
            1,
            "no quorum, and no other device can be selected (1 update, b, c declined); starting another attempt",
        ),
        (
            [TaskDeclined(0, "b", "data", "none"), UpdateRejected(0, "c", "NaN")],
            1,
            "no quorum by the deadline (0 updates, update of c rejected, b declined, nothing from a); "
            "starting another attempt",
        ),
        (
            [TaskDeclined(0, "a", "none", "nothing"), answer("b"), answer("c")],
            1,
            "no quorum, and no other device can be selected (2 updates, no task for a); starting another attempt",
        ),
        (
            [],
            0,
            "no quorum by the deadline (0 updates, nothing from a, b, c); repeating the attempt, as devices are "
            "offline or working for other jobs",
        ),
    ],
)
def test_an_attempt_without_a_quorum_says_what_became_of_it(facts, attempt, said):
    facts = [CohortSelected(0, 0, ("a", "b", "c")), *facts, RoundRetried(0, attempt)]
    told = formatted(begun(CohortSettings(size=4)), facts)[-1]
    assert told == [f"round 1: {said}"]
    assert event_messages.format_single_event(RoundRetried(0, 1)) == ["round 1: no quorum; starting another attempt"]


def test_a_count_is_told_to_the_last_one():
    told = event_messages.format_single_event(
        RoundCommitted(0, REF, False, {"examples": 12001.0, "loss": 0.123456}), False
    )
    assert told == ["round 1: updates aggregated; examples 12001, loss 0.1235"]


def test_an_evaluation_is_told_with_the_round_that_made_what_was_evaluated():
    for round, of in ((0, "at the start"), (3, "after round 3")):
        evaluated = "accuracy 50.0 % on 4 held-out examples, balanced accuracy 50.0 %, macro F1 33.3 %, loss 0.5"
        (told,) = event_messages.format_single_event(
            RoundCommitted(round, REF, False, {"loss": 0.25}, evaluation=of_classes(0.5, 4))
        )
        assert told == f"round {round + 1}: updates aggregated; loss 0.25; {of}: {evaluated}"
    noted = event_messages.format_single_event(
        RoundCommitted(3, REF, False, {"loss": 0.25}, ("a note",), evaluation=of_classes(0.5, 4))
    )
    assert noted == [f"round 4: updates aggregated; after round 3: {evaluated}", "a note"]


def test_a_round_ends_with_its_accuracy_devices_and_joules():
    state = begun(CohortSettings(size=4), check_every=1)
    metered = [msgspec.structs.replace(answer(name).update, usage=Usage(wall_s=1.0, energy_j=6.0)) for name in "ab"]
    facts = [
        CohortSelected(0, 0, tuple("abcd")),
        *(UpdateAccepted(0, update) for update in metered),
        answer("c"),
        RoundClosed(0),
    ]
    checked = total(of_classes(0.8, 10, 0.25), of_classes(0.6, 10, 0.75), of_classes(0.7, 20))
    facts += [RoundCommitted(0, REF, False, {"loss": 0.25}, evaluation=checked)]
    facts += [CohortSelected(1, 0, ("a",)), RoundClosed(1), RoundCommitted(1, REF, False, {}, is_evaluation_round=True)]
    told = formatted(state, facts)
    assert told[5] == [
        "round 1: updates aggregated (3 of 4 devices, 12 J of 2 with a meter); loss 0.25; "
        "at the start: accuracy 70.0 % on 40 held-out examples, worst tenth of 3 devices 60.0 %, "
        "gap to the best tenth 20.0 %, spread 8.2 %, "
        "balanced accuracy 70.0 %, macro F1 41.2 %, loss 0.5"
    ]
    # nothing of the round before is in it
    assert told[-1] == ["round 2: statistics for the evaluation gathered (0 of 1 devices)"]


def test_an_evaluation_has_its_own_metrics():
    (told,) = event_messages.format_single_event(
        RoundCommitted(1, REF, False, {}, evaluation=of_numbers(1.5, 1.25, 40))
    )
    assert told.endswith("after round 1: RMSE 1.5 on 40 held-out examples, MAE 1.25, loss 2.25")


def test_many_that_decline_for_one_reason_are_counted(capsys):
    class Job:
        id = "j"
        job = JOB
        job_state = begun(CohortSettings())

    console = Console(clock=lambda: 0.0)
    for number in (0, 1):
        for device in range(1000 if number == 0 else 2):
            console.observe(Job(), TaskDeclined(number, f"dev-{device}", "memory", "too small"))
        console.observe(Job(), RoundRetried(number, 1))
    told = [line for line in capsys.readouterr().out.splitlines() if "declined" in line]
    assert told == [
        "[   0.0 s] round 1: dev-0, dev-1, dev-10, dev-100, dev-101 and 995 more: declined (memory): too small",
        "[   0.0 s] round 2: dev-0, dev-1: declined (memory): too small",
    ]


def test_reasons_without_room_are_counted():
    declined = {"a": "too big", "b": "too big", "c": "too hot", "d": "no data"}
    assert selection.format_by_reason(declined) == "a, b: too big; c: too hot; d: no data"
    many = selection.format_by_reason({f"dev-{number}": f"reason {number}" for number in range(7)})
    assert many.endswith("; dev-4: reason 4; 2 more reasons")
    assert selection.format_by_reason(declined, 2) == "a, b: too big; c: too hot; 1 more reason"
    assert selection.format_by_reason(declined, 1) == "a and 1 more: too big; 2 more reasons"


def observe_round(console: Console, state: JobState, facts: Sequence[AnyEvent]) -> JobState:
    for fact in facts:
        state = apply_event(state, fact, 1.0)
        console.observe(EndedJob("j", JOB, state), fact)
    return state


def round_facts(number: int, score: float | None, devices: str = "ab", energy_j: float = 6.0) -> list[AnyEvent]:
    usage = Usage(wall_s=1.0, energy_j=energy_j, energy_source="profile pi (assumed)", down_bytes=500, up_bytes=500)
    updates = [msgspec.structs.replace(answer(device, number).update, usage=usage) for device in devices]
    told = [UpdateAccepted(number, update) for update in updates]
    evaluation = None if score is None else total(of_classes(score))
    committed = RoundCommitted(number, REF, False, {"loss": 0.25}, evaluation=evaluation)
    return [CohortSelected(number, 0, ("a", "b")), *told, RoundClosed(number), committed]


def test_the_line_of_a_round_has_its_own_accuracy_and_fits_80_columns(capsys):
    console = Console(clock=lambda: 0.0, stamp=VIRTUAL_FORMAT.format)
    state = begun(CohortSettings(), check_every=1)
    state = observe_round(console, state, round_facts(0, 0.1))
    assert capsys.readouterr().out == ""
    state = observe_round(console, state, round_facts(1, 0.5, "a"))
    state = observe_round(console, state, [*round_facts(2, 0.8), JobEnded("done")])
    head = "[   0.0 s virtual] "
    assert capsys.readouterr().out.splitlines() == [
        f"{head}round 1 of 2: accuracy 50.0 %, 12 J predicted, 2 kB",
        f"{head}round 2 of 2: accuracy 80.0 %, 1 of 2 devices, 6 J predicted",
        f"{head}done",
    ]
    wide = RoundSummary(
        1,
        rounds_before=99,
        selected=999,
        cost=run_summary.CostLedger(tasks=998, metered=998, energy_j=1e7, down_bytes=10**9),
    )
    line = event_messages.format_round(wide, 100, "balanced accuracy 50.0 %", 60)
    assert line == "round 100 of 100: balanced accuracy 50.0 %, 10 MJ, 1 GB"


def test_a_round_without_an_evaluation_is_told_at_once(capsys):
    console = Console(clock=lambda: 0.0)
    observe_round(console, begun(CohortSettings()), round_facts(0, None, "ab", 600.0))
    assert capsys.readouterr().out == "[   0.0 s] round 1 of 2: loss 0.25, 1.2 kJ predicted, 2 kB, 2 devices\n"
    state = JobState(JobConstants(0, 2, CohortSettings(), 1, check_beside=True))
    console = Console(clock=lambda: 0.0)
    observe_round(console, apply_event(state, JobStarted(REF), 0.0), round_facts(0, None))
    assert "round 1 of 2: loss 0.25, 12 J" in capsys.readouterr().out


@pytest.mark.parametrize("wordy", [False, True])
def test_warnings_are_printed_once_and_notes_of_a_method_only_among_all_events(wordy, capsys):
    console, state = Console(wordy, clock=lambda: 0.0), begun(CohortSettings())
    for number in (0, 1):
        *before, committed = round_facts(number, None)
        told = msgspec.structs.replace(
            committed, notes=("a note",), warnings=("no meter", "too few rounds")[: number + 1]
        )
        state = observe_round(console, state, [*before, told])
    lines = [line.removeprefix("[   0.0 s] ").strip() for line in capsys.readouterr().out.splitlines()]
    told = [line for line in lines if line in ("a note", "no meter", "too few rounds")]
    repeated = ["a note", "no meter", "a note", "no meter", "too few rounds"]
    assert told == (repeated if wordy else ["no meter", "too few rounds"])


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (0, ["round 1 of 2: loss 0.25, 12 J predicted, 2 kB, 2 devices"]),
        (7, []),  # from the second update on
        (9, ["round 2 of 2: loss 0.25"]),  # from the commit on, before which nothing is known
    ],
)
def test_the_line_of_a_round_that_began_before_the_console_has_its_number_and_devices(capsys, seen, said):
    console, state = Console(clock=lambda: 0.0), begun(CohortSettings())
    for number, fact in enumerate([*round_facts(0, None), *round_facts(1, None)]):
        state = apply_event(state, fact, 1.0)
        if number >= seen:
            console.observe(EndedJob("j", JOB, state), fact)
    if seen < 9:
        said = [*said, "round 2 of 2: loss 0.25, 12 J predicted, 2 kB, 2 devices"]
    assert capsys.readouterr().out.splitlines() == [f"[   0.0 s] {line}" for line in said]


def test_a_terminal_shows_the_running_round_in_one_block(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    facts = [*round_facts(0, 0.1), *round_facts(1, 0.5)[:2], TaskDeclined(1, "b", "memory", "too big")]
    for term, block in (("xterm", True), ("dumb", False)):
        out = Terminal()
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr(progress, "LIVE_INTERVAL_S", -1.0)
        monkeypatch.setattr("sys.stdout", out)
        console = Console(clock=lambda: 0.0)
        state = observe_round(console, begun(CohortSettings(), check_every=1), facts)
        console.report_wait(EndedJob("j", JOB, state), WaitReason("c, at work", "c", "working"), 0.0)
        console.refresh()
        monkeypatch.undo()
        assert ("\x1b" in out.getvalue()) == block
        shown = out.getvalue().rpartition("\x1b[J")[2].splitlines()
        assert shown == block * [
            "[   0.0 s] round 2 of 2 ████████████████████ 100 %, about 0 s left",
            "accuracy 10.0 %, 18 J predicted, 3 kB so far",
            "1 of 1 devices answered, declined: b: too big",
            "waiting for c, at work",
        ]
