"""A run's page: one file, well-formed, nothing from elsewhere, with the run's own numbers."""

from __future__ import annotations

import html
import re
import sys
import tempfile
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import plain
import pytest
from evaluations import of_classes, total
from msgspec import structs

from fedquilt.arrays import tensors
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import (
    AnyEvent,
    CohortSelected,
    EligibilityRecorded,
    JobEnded,
    JobStarted,
    RoundClosed,
    RoundCommitted,
    TaskDeclined,
    UpdateAccepted,
)
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import scores
from fedquilt.coordinator.views.run_summary import DeviceScore
from fedquilt.core import BlobRef, Update, Usage
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle
from fedquilt.tools import report
from fedquilt.tools.report import sections
from fedquilt.tools.simulation import agents

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BLOB = BlobRef(sha256="a" * 64, size=1)
DIGITS = Path(agents.__file__).parents[1] / "lab" / "demo" / "digits.npz"
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.shown: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown.append(data)


def update(device: str, round: int, accuracy: float | None = None, **usage: Any) -> Update:
    usage = {"wall_s": 2.0, "down_bytes": 3_000_000, "up_bytes": 1_000_000, **usage}
    return plain.update(
        round=round,
        device=device,
        evaluation=None if accuracy is None else of_classes(accuracy, 8),
        usage=Usage(**usage),
    )


METERED = {"energy_j": 12.5, "idle_j": 4.5, "energy_source": "INA3221", "peak_bytes": 300_000_000, "base_bytes": 10**8}
FACTS: list[AnyEvent] = [
    JobStarted(BLOB),
    EligibilityRecorded(0, ("a", "b", "c"), {"hot": ("d",)}),
    CohortSelected(0, 0, ("a", "b")),
    UpdateAccepted(0, update("a", 0, 0.25, **METERED), 3.0),
    TaskDeclined(0, "b", "memory", "too big for 64 MB"),
    RoundClosed(0),
    RoundCommitted(0, BLOB, False, {}, ("one <b>bold</b> note",), 4.0, evaluation=total(of_classes(0.25, 8))),
    CohortSelected(1, 0, ("a",)),
    UpdateAccepted(1, update("a", 1, 0.875), 3.0),
    RoundClosed(1),
    RoundCommitted(1, BLOB, False, {}, (), 4.0, evaluation=total(of_classes(0.875, 8))),
    JobEnded("done"),
]


def run_of(store: Store, facts: list[AnyEvent], **changes: object) -> str:
    run = store.add_job(settings.parse_job({"name": "leaves", "method": "fedavg", "rounds": 1, **changes}), store.home)
    for fact in facts:
        store.append_event(run, fact)
    store.set_status(run, "done")
    return run


def page_of(tmp_path: Path, facts: list[AnyEvent], **changes: object) -> tuple[str, Page]:
    with Store(tmp_path / "runs") as store:
        run = run_of(store, facts, **changes)
        text = report.write_run_page(store, run, tmp_path / "out" / "page.html").read_text()
    return text, Page(text)


@cache
def usual_page() -> tuple[str, Page]:
    with tempfile.TemporaryDirectory() as folder:
        return page_of(Path(folder), FACTS)


def test_the_page_is_well_formed_and_needs_nothing_but_itself() -> None:
    text, page = usual_page()
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert [link for link in page.links if not link.startswith("#")] == []
    assert not re.search(r"url\((?!#)|@import| on\w+=", text)
    spaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"'<> ]+", text)) <= spaces
    pictures = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(pictures) >= 6
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert "prefers-color-scheme:dark" in text


def test_the_page_can_be_read_aloud() -> None:
    text, page = usual_page()
    labels = re.findall(r'<svg[^>]*role="img" aria-label="([^"]+)"', text)
    assert len(labels) == text.count("<svg")
    assert any(label.startswith("Accuracy by round; ") and "ends at 87.5" in label for label in labels)
    tables = re.findall(r"<table.*?</table>", text, re.S)
    assert len(tables) == 4
    for table in tables:
        assert 'scope="col"' in table
        assert table.count('scope="row"') == table.count("<tr>") - 1
    assert {"main", "h1", "h2"} <= page.tags
    assert '<html lang="en">' in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_the_job_is_shown_as_the_file_that_it_could_be(tmp_path: Path) -> None:
    text, _ = page_of(tmp_path, FACTS, params={"lr": 0.5}, check={"every": 1}, labels=["<a>", "b"])
    shown = html.unescape(text[text.rindex("<pre>") + 5 : text.rindex("</pre>")])
    wanted = {"name": "leaves", "method": "fedavg", "rounds": 1, "params": {"lr": 0.5}, "check": {"every": 1}}
    assert tomllib.loads(shown) == {**wanted, "labels": ["<a>", "b"]}
    assert settings.parse_job(tomllib.loads(shown)) == settings.parse_job({**wanted, "labels": ["<a>", "b"]})


def test_the_page_holds_the_runs_numbers() -> None:
    text, page = usual_page()
    assert {"a, idle: 4.5", "a, above idle: 8"} <= set(re.findall("<title>(.*?)<", text))
    shown = " ".join(page.shown)
    for wanted in (
        "87.5 %",  # after the last round
        "12.50 J",  # of the boards
        "1 of 2 tasks",  # that were metered
        "8.00",  # above idle
        "300 MB",  # at its highest
        "by the coordinator's clock",
        "by this machine's clock",
        "final evaluation: accuracy 87.5 % on 8 held-out examples, balanced accuracy 87.5 %",
        "6 MB down and 2 MB up",
        "declined (memory): too big for 64 MB",
        "hotter than",
        "INA3221",
        "done",
    ):
        assert wanted in shown, wanted


def test_one_of_the_costs_is_shown_and_a_switch_selects_another() -> None:
    text, _ = usual_page()
    (switch,) = re.findall(r'<div class="switch">(?:(?!</div>).)*name="Accuracy".*?</div>', text, re.S)
    names = re.findall(r"<label[^>]*>([^<]*)</label>", switch)
    assert names == ["rounds", "seconds", "board seconds", "bytes", "joules"]
    titles = re.findall(r'<svg[^>]*aria-label="Accuracy ([^;]*);', html.unescape(switch))
    assert titles == ["by round", "by time", "by the boards' time", "by bytes", "by energy"]
    assert switch.count(" checked>") == 1
    rules = [f"input:nth-of-type({n}):checked~svg:nth-of-type({n})" for n in range(1, len(names) + 1)]
    assert all(rule in text for rule in rules)


def test_the_confusion_matrix_counts_the_last_evaluation(tmp_path: Path) -> None:
    text, _ = page_of(tmp_path, FACTS, labels=["cat", "dog"])
    assert "Confusion matrix: 7 of 8 examples are classified correctly" in text
    assert "cat, predicted dog: " in text


def test_the_timeline_shows_what_each_device_did_in_a_round() -> None:
    """2 s at the task, 1 s down, start and up, and 1 s of waiting for the end of the round."""
    text, _ = usual_page()
    labels = re.findall(r'aria-label="(Devices in [^"]*)"', text)
    assert labels == [
        "Devices in round 1; s, since the round began; a 4",
        "Devices in the final evaluation; s, since the round began; a 4",
    ]
    for part in ("a, task: 2", "a, down, start and up: 1", "a, waiting: 1"):
        assert text.count(f"<title>{part}</title>") == 2, part


def test_a_device_that_is_asked_again_begins_later_in_the_timeline(tmp_path: Path) -> None:
    """After 5 s of 10. Both devices answer 3 s after they were asked."""
    with Store(tmp_path) as store:
        found = report.load_run_data(store, run_of(store, FACTS))
    dated: list[tuple[float, AnyEvent]] = [
        (100.0, CohortSelected(0, 0, ("a", "b"))),
        (103.0, UpdateAccepted(0, update("a", 0), 3.0)),
        (105.0, CohortSelected(0, 1, ("b",))),
        (108.0, UpdateAccepted(0, update("b", 0), 3.0)),
        (110.0, RoundCommitted(0, BLOB, False, {}, (), 10.0)),
    ]
    section = sections.make_timeline_section(replace(found, events=tuple(dated)))
    assert section is not None
    ((_, drawn),) = section.switch
    assert {"a, before selection: 0", "a, task: 2", "a, waiting: 7"} <= set(re.findall("<title>(.*?)<", str(drawn)))
    assert {"b, before selection: 5", "b, task: 2", "b, waiting: 2"} <= set(re.findall("<title>(.*?)<", str(drawn)))


def test_of_many_devices_the_worst_errors_are_drawn(tmp_path: Path) -> None:
    """A low error is better, so the 40 highest ones are drawn, and the page says so."""
    with Store(tmp_path) as store:
        facts: list[AnyEvent] = [JobStarted(BLOB), CohortSelected(0, 0, tuple(f"dev-{i:02d}" for i in range(50)))]
        facts += [UpdateAccepted(0, update(f"dev-{i:02d}", 0), 2.0) for i in range(50)]
        run = run_of(store, [*facts, RoundClosed(0), RoundCommitted(0, BLOB, False, {}, (), 2.0)])
        found = report.load_run_data(store, run)
    errors = {f"dev-{i:02d}": DeviceScore(0, i / 10, 5) for i in range(50)}
    summary = structs.replace(found.summary, scores=errors)
    measured = scores.EvaluationScore(1, 1.0, 1, metric="rmse")
    section = sections.make_device_section(replace(found, summary=summary, scores=(measured,)))
    assert section is not None
    assert "RMSE: the worst 40 of 50 devices are drawn." in section.notes
    assert "dev-49 4.9" in str(section)
    assert section.table is not None
    assert section.table.head[-2:] == ["held out", "last RMSE"]
    assert section.table.rows[0][-2:] == ["5", "0"]
    assert "dev-09 0.9" not in str(section)


def test_where_the_time_went_adds_up() -> None:
    """Both rounds: 2 s at the task, 1 s moving, 1 s waiting, of 4 s."""
    _, page = usual_page()
    shown = " ".join(page.shown)
    assert "50 % of the time on its task, 25 % on transfers and the start, and 25 % waiting" in shown


def test_what_a_run_says_is_text_and_no_html() -> None:
    text, page = usual_page()
    assert "one <b>bold</b> note" in "".join(page.shown)
    assert "<b>bold" not in text


def test_a_run_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    _, page = page_of(tmp_path, [])
    assert "Nothing yet." in "".join(page.shown)


def test_boards_without_meters_have_no_joules(tmp_path: Path) -> None:
    """Not 0 J: no tile, no picture, and a dash in the table."""
    facts = [
        JobStarted(BLOB),
        CohortSelected(0, 0, ("a",)),
        UpdateAccepted(0, update("a", 0), 2.0),
        RoundClosed(0),
        RoundCommitted(0, BLOB, False, {}, (), 2.0),
    ]
    text, _ = page_of(tmp_path, facts)
    assert "Energy of each device" not in text
    assert "Accuracy of each device" not in text
    assert "Accuracy by energy" not in text
    assert "of the boards" not in text


def test_a_large_fleet_is_drawn_in_part_and_told_in_whole(tmp_path: Path) -> None:
    facts: list[AnyEvent] = [JobStarted(BLOB)]
    for number in range(100):
        device = f"dev-{number:03d}"
        facts += [CohortSelected(number, 0, (device,)), UpdateAccepted(number, update(device, number, **METERED), 2.0)]
        facts += [RoundClosed(number), RoundCommitted(number, BLOB, False, {}, (), 2.0)]
    text, page = page_of(tmp_path, facts, rounds=200)
    shown = "".join(page.shown)
    assert "40 of 100 rounds are drawn" in shown
    assert "Drawn: 40 of 100 devices" in shown
    assert "40 more devices are not shown" in shown
    assert all(f">dev-{number:03d}</th>" in text for number in range(100))


def test_the_picture_of_who_took_part_has_a_square_for_each(tmp_path: Path) -> None:
    """Three in round 0, two of whom were not asked; each says why when pointed at."""
    with Store(tmp_path) as store:
        found = report.load_run_data(store, run_of(store, FACTS))
    drawn = sections.make_device_matrix(found.parts, found.summary.final_evaluation_round)
    cells = {name: list(row) for name, row in drawn.rows}
    assert cells["a"][0] == ("answered", "round 1, a: update received")
    assert cells["b"] == [
        ("declined", "round 1, b: declined (memory): too big for 64 MB"),
        ("drawn", "final evaluation, b: not drawn: place 3 of 3, 1 selected"),
    ]
    assert cells["d"][0] == ("barred", "round 1, d: is hotter than [cohort] max_temperature_c")
    assert cells["c"][0][0] == "drawn"
    assert [code for code, _ in drawn.keys] == ["answered", "declined", "barred", "drawn"]
    assert sum(columns for _, columns in drawn.heads) == 2


def test_a_fleets_run_is_reported_with_its_partition_and_its_test_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = {"name": "mlp", "inputs": 64, "hidden": [8], "classes": 10}
    first = tensors.encode_tensors(numpy_engine.init_tensors(network, seed=0))
    job_bundle.write_bundle(tmp_path / "bundle", {"network": network, "flops": 1200}, {"model": first})
    table = {
        "name": "digits",
        "method": "fedavg",
        "rounds": 2,
        "engine": "numpy",
        "params": {"lr": 0.2},
        "check": {"every": 1},
        "fleet": {"devices": 3, "boards": ["jetson-nano"]},
        "data": {"path": str(DIGITS), "partition": "iid"},
    }
    plan = agents.FleetPlan(settings.parse_job(table), tmp_path / "bundle", tmp_path / "runs")
    agents.run_fleet_virtually(plan)
    home = ["--home", str(plan.home)]
    assert main(["model", "evaluate", "digits", *home]) == 0
    assert main(["report", "digits", *home, "--out", str(tmp_path / "page.html")]) == 0
    page = Page((tmp_path / "page.html").read_text())
    shown = " ".join(page.shown)
    with Store(plan.home) as store:
        (score,) = scores.read_scores(store.home, store.find_job("digits")).scores
    assert f"{100 * score.value:.1f} %" in shown
    assert "test accuracy" in shown
    assert "jetson-nano-02" in shown
    assert "Who has which examples" in shown
    assert "Accuracy by energy" in shown


def test_one_evaluation_is_told_and_not_drawn(tmp_path: Path) -> None:
    text, page = page_of(tmp_path, FACTS[:7], rounds=5)
    assert "Accuracy by round" not in text
    assert "25.0 %" in " ".join(page.shown)


def test_the_partition_is_drawn_for_the_devices_that_took_part_and_for_no_others(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "data": {"path": str(DIGITS), "partition": "iid"},
        "fleet": {"devices": 8, "boards": ["jetson-nano"]},
    }

    def picture(*devices: str) -> str:
        with Store(tmp_path) as store:
            facts: list[AnyEvent] = [JobStarted(BLOB), EligibilityRecorded(0, devices), CohortSelected(0, 0, devices)]
            return report.load_run_data(store, run_of(store, facts, **changes)).partition

    two = picture("jetson-nano-00", "jetson-nano-01")
    assert "jetson-nano-01" in two
    assert "jetson-nano-02" not in two
    assert "jetson-nano-07" in picture("jetson-nano-00", "jetson-nano-07")
    assert picture("kitchen", "cellar") == ""
