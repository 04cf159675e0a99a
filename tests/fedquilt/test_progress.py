"""Progress on a terminal and elsewhere."""

import io
import logging
import sys
import threading

import pytest

from fedquilt.console import progress
from fedquilt.console.progress import FIRST_LINE_S, LIVE_INTERVAL_S, MAX_INTERVAL_S, MIN_INTERVAL_S, ProgressLine


class Clock:
    """Time that the test moves on."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(("columns", "bar"), [(80, 20), (52, 10), (45, 0)])
def test_a_bar_shrinks_until_the_line_fits(clock, monkeypatch, columns, bar):
    """The remaining time is cut off by no bar."""
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    line, what = ProgressLine(out, clock=clock), "run 1 of 4: fedavg"
    for done in range(4):
        clock.now_s = 10.0 * done
        line.show_status(what, done, 8)
    (shown,) = out.getvalue().split("\r\x1b[K")[-1:]
    assert shown.startswith(what)
    assert shown.endswith(" 38 %, about 50 s left")
    assert len(shown) < columns
    assert shown.count("█") + shown.count("░") == bar


def test_elsewhere_a_line_comes_now_and_then(clock):
    out = io.StringIO()
    line = ProgressLine(out, clock=clock)
    shown = []
    for second in range(3600):
        clock.now_s = float(second)
        before = out.tell()
        line.show_status("work")
        if out.tell() > before:
            shown.append(second)
    assert shown[:4] == [
        FIRST_LINE_S,
        FIRST_LINE_S + MIN_INTERVAL_S,
        FIRST_LINE_S + 2 * MIN_INTERVAL_S,
        FIRST_LINE_S + 3 * MIN_INTERVAL_S,
    ]
    assert 20 < len(shown) < 60
    assert shown[-1] - shown[-2] > 200
    assert shown[-1] - shown[-2] <= MAX_INTERVAL_S
    assert "\r" not in out.getvalue()


def test_a_terminal_has_one_line_that_is_rewritten_in_its_width(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    line = ProgressLine(out, clock=clock)
    line.show_status("one")
    line.show_status("two")  # too soon
    clock.now_s += LIVE_INTERVAL_S
    line.show_status("three, which is longer than the terminal")
    line.print_lines("stays")
    line.show_status("four")
    line.end_operation()
    assert out.getvalue() == "\r\x1b[Kone\r\x1b[Kthree, which is lo…\r\x1b[Kstays\n\r\x1b[Kfour\r\x1b[K"


BAR = {4: "████████░░░░░░░░░░░░", 6: "████████████░░░░░░░░"}


def test_how_long_the_rest_takes_is_told_by_what_has_been_done(clock):
    """Since the first call: what was done before took none of this time."""
    out = Terminal()
    line = ProgressLine(out, clock=clock)
    line.show_status("runs", 4, 10)
    clock.now_s += 60
    line.show_status("runs", 6, 10)
    told = out.getvalue().split("\r\x1b[K")[1:]
    assert told == [f"runs {BAR[4]} 40 %", f"runs {BAR[6]} 60 %, about 2 min left"]


def test_a_remaining_time_does_not_climb(clock):
    shown = []
    for slow, fast in ((1.4, 1.0), (5.0, 1.0)):
        line = ProgressLine(io.StringIO(), clock=clock)
        told = []
        for done in range(10):
            told.append(line._format_remaining(done, 10, clock.now_s).partition("about ")[2])
            clock.now_s += 60 * (slow if 2 <= done < 5 else fast)
        shown.append(told)
    minutes = [int(each.split()[0]) for each in shown[0] if "min" in each]
    assert minutes == sorted(minutes, reverse=True)
    assert shown[0][:2] == ["", ""]  # too little is done
    assert shown[0][2] == "8 min left"
    assert shown[1][3:6] == ["", "", ""]


def test_further_lines_are_rewritten_in_place_and_only_on_a_terminal(clock):
    out, file = Terminal(), io.StringIO()
    line = ProgressLine(out, clock=clock)
    line.show_status("one\ntwo\nthree")
    line.print_lines("stays")
    assert out.getvalue() == "\r\x1b[Kone\ntwo\nthree\r\x1b[2A\x1b[Jstays\n"
    line = ProgressLine(file, clock=clock)
    line.show_status("one\ntwo", 1, 4)
    clock.now_s += FIRST_LINE_S
    line.show_status("one\ntwo", 1, 4)
    assert file.getvalue() == "one: 25 %\n"


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal that shows standard output and standard error, and a logger with its root handler."""
    shown = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, shown)
    monkeypatch.setattr(logging.getLogger(), "handlers", [progress.LogHandler()])
    return shown


def test_records_and_lines_beside_a_block_stay_readable(clock, monkeypatch):
    terminal = open_terminal(monkeypatch)
    block = ProgressLine(sys.stdout, clock=clock)
    for tell in (logging.warning, ProgressLine(clock=clock).print_lines, ProgressLine(clock=clock).print_to_stdout):
        block.show_status("one\ntwo")
        tell("said")
    assert terminal.getvalue() == 3 * "\r\x1b[Kone\ntwo\r\x1b[1A\x1b[Jsaid\n"


def test_a_record_of_a_function_that_makes_a_line_waits_for_no_other_thread(clock, monkeypatch):
    """Another thread logs at that time, and waits for the line."""
    terminal = open_terminal(monkeypatch)
    line, begun = ProgressLine(sys.stdout, clock=clock), threading.Event()
    other = threading.Thread(target=lambda: (begun.set(), logging.warning("other")), daemon=True)

    def make_text():
        other.start()
        assert begun.wait(120)
        other.join(0.2)
        logging.warning("own")
        return "text"

    line.show_status("before")
    clock.now_s += LIVE_INTERVAL_S
    shower = threading.Thread(target=lambda: line.show_status(make_text), daemon=True)
    shower.start()
    for thread in (shower, other):
        thread.join(120)
        assert not thread.is_alive()
    assert "own\n\r\x1b[Ktext\r\x1b[Kother\n" in terminal.getvalue()


def test_a_line_that_says_the_same_is_not_written_again(clock):
    out = Terminal()
    line = ProgressLine(out, clock=clock)
    for _ in range(3):
        line.show_status("work")
        clock.now_s += LIVE_INTERVAL_S
    assert out.getvalue() == "\r\x1b[Kwork"


def test_work_in_parts_says_which_it_is_at_how_many_are_done_and_how_long_the_others_may_take():
    out = Terminal()
    line = ProgressLine(out, live=True, clock=(clock := Clock()))
    with progress.show_progress("preparing", line):
        for number, name in enumerate(("donor a", "donor b", "the files")):
            clock.now_s += 10.0
            line.set_part(name, number, 3)
            line.show_elapsed("preparing", 0.0)
    told = [text for text in out.getvalue().split("\r\x1b[K") if text]
    assert any(
        text.startswith("preparing: donor a, ") and text.endswith(" so far ░░░░░░░░░░░░░░░░░░░░ 0 %") for text in told
    )
    assert told[-1].startswith("preparing: the files, ")
    assert told[-1].endswith(" 67 %, about 10 s left")
    clock.now_s += 10.0
    line.show_elapsed("another", 0.0)
    assert out.getvalue().endswith(" so far")


def test_elsewhere_a_line_is_repeated_only_after_a_change(clock):
    out = io.StringIO()
    line = ProgressLine(out, clock=clock, max_interval_s=30.0)
    for second in range(3600):
        clock.now_s = float(second)
        line.show_status("runs", 4 if second < 1800 else 5 + second / 1800, 18)
    assert len(out.getvalue().splitlines()) == 1 + 1800 / 30
