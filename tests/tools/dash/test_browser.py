"""The dashboard in a real browser: ten, a thousand and ten thousand boards, wide and narrow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import dashes
import pytest
from browsers import CHROMIUM, Browser, Tab
from dashes import Dashboard
from msgspec.structs import replace

from fedquilt.coordinator.fleet.device_status import LatestDecline, TelemetryStore
from fedquilt.coordinator.jobs.retention import remove_runs
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import devices

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'fedquilt[web]'")

MARKUP = "<img src=x onerror=document.title='taken'>"
ROLLED = "tables-20261123-041500-1a2b3c"
WIDE, NARROW = (1280, 800), (390, 844)
SHOWN = "Number(document.body?.dataset.shown ?? 0) > 0"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as made:
        yield made


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    yield chromium
    chromium.close_tabs()


def planted(folder: Path) -> Path:
    home, names = folder / "runs", dashes.names(40)
    run = dashes.add_run(home, dashes.facts(names))
    dashes.add_boards(home, names, run)
    dashes.add_rollout(home, names, bad=True)
    dashes.add_rollout(home, names, ROLLED)
    return home


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return planted(tmp_path)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    with Dashboard(planted(tmp_path_factory.mktemp("shown"))) as dash:
        yield dash


def opened(browser: Browser, dash: Dashboard, path: str, size: tuple[int, int] = WIDE) -> Tab:
    tab = browser.open(f"{dash.url}{path}", *size)
    tab.until(SHOWN)
    return tab


def fine(tab: Tab) -> bool:
    wide = tab.value("document.documentElement.scrollWidth <= innerWidth")
    assert tab.problems == []
    return bool(wide)


@pytest.mark.parametrize(
    ("count", "size"),
    [
        (10, NARROW),
        (10_000, WIDE),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in product((10, 1000, 10_000), (WIDE, NARROW))),
    ],
)
def test_a_fleet_of_any_size_is_shown(browser: Browser, tmp_path: Path, count: int, size: tuple[int, int]) -> None:
    home, names = tmp_path / "runs", dashes.names(count)
    Store(home).close()
    dashes.add_boards(home, names)
    with Dashboard(home) as dash:
        tab = opened(browser, dash, "/", size)
        assert tab.value("document.querySelectorAll('.fleet tbody tr').length") == min(count, 100)
        assert f"all boards\n{count:,}" in tab.text.replace("\n\n", "\n")
        assert fine(tab)
        tab.value("[...document.querySelectorAll('.views button')].find((each) => each.textContent === 'grid').click()")
        tab.until(f"document.querySelectorAll('.grid li').length === {min(count, 2000)}")
        assert fine(tab)
        search = "document.querySelector('input[type=search]')"
        tab.value(f"{search}.value = '{names[-1]}'; {search}.dispatchEvent(new Event('input'))")
        tab.until("document.querySelectorAll('.grid li').length === 1")
        assert tab.value("document.querySelector('.grid a').getAttribute('href')") == f"/boards/{names[-1]}"
        assert "view=grid" in tab.value("location.search")


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    "path", ["/", "/?view=grid", "/boards/board-00001", "/runs", "/runs/digits", "/rollouts", "/log"]
)
def test_every_page_is_whole(browser: Browser, shown: Dashboard, path: str, size: tuple[int, int]) -> None:
    tab = opened(browser, shown, path, size)
    tab.until("document.querySelector('#link').textContent === 'live'")
    assert fine(tab)
    for selector, count in (("h1", 1), ("main", 1), ("header nav", 1), ("[aria-current=page]", 1), ("a.skip", 1)):
        assert tab.value(f"document.querySelectorAll({selector!r}).length") == count
    assert tab.value("[...document.querySelectorAll('table')].every((each) => each.caption && each.tHead)")
    assert tab.value("[...document.querySelectorAll('th')].every((each) => each.scope)")
    named = "each.labels?.length || each.getAttribute('aria-label')"
    assert tab.value(f"[...document.querySelectorAll('input, select, meter')].every((each) => {named})")
    assert tab.value("[...document.querySelectorAll('svg')].every((each) => each.getAttribute('aria-label'))")
    assert tab.value("[...document.querySelectorAll('[aria-live]')].length") == 2


def test_a_change_comes_to_the_screen_by_itself(browser: Browser, home: Path) -> None:
    with Dashboard(home) as dash:
        tab = opened(browser, dash, "/")
        tab.until("document.querySelector('#link').textContent === 'live'")
        row = "document.querySelector('[data-key=board-00002]')"
        tab.value(f"document.querySelector('[data-key=board-00003]').mine = true; {row}.querySelector('a').focus()")
        refusal = LatestDecline(0.0, "thermal", "too hot")
        (board,) = [each.board for each in devices.load_devices(home) if each.board.device == "board-00002"]
        with TelemetryStore(home, writes=True) as store:
            store.write_telemetry([replace(board, refusal=refusal)], [])
        tab.until(f"{row}.textContent.includes('thermal')")
        assert tab.value("document.activeElement.textContent") == "board-00002"
        assert tab.value("document.querySelector('[data-key=board-00003]').mine")


def test_from_the_page_alone_a_stranger_finds_why(browser: Browser, shown: Dashboard) -> None:
    tab = opened(browser, shown, "/boards/board-00005")
    tab.until("document.querySelectorAll('.turns tbody tr').length === 3")
    assert "offline" in tab.value("document.querySelector('.turns tbody tr').textContent")
    link = tab.value("document.querySelectorAll('.turns tbody tr')[1].querySelector('a').getAttribute('href')")
    tab = opened(browser, shown, link)
    assert tab.value("document.querySelector('input[type=number]').value") == "2"
    search = "document.querySelector('#why input[type=search]')"
    tab.value(f"{search}.value = 'board-00030'; {search}.dispatchEvent(new Event('input'))")
    tab.until("document.querySelectorAll('table.why tbody tr').length === 1")
    assert "offline" in tab.value("document.querySelector('table.why tbody').textContent")
    tab.value(f"{search}.value = 'board-00039'; {search}.dispatchEvent(new Event('input'))")
    tab.until("document.querySelector('table.why tbody').textContent.includes('not drawn: place')")


def test_markup_is_text(browser: Browser, home: Path) -> None:
    odd = {
        "labels": (MARKUP,),
        "board": MARKUP,
        "mode": MARKUP,
        "refusal": LatestDecline(1.0, MARKUP, MARKUP, MARKUP, 1),
    }
    dashes.add_boards(home, dashes.names(40), **{"board-00001": odd})
    with Dashboard(home) as dash:
        for path in ("/", "/?view=grid", "/boards/board-00001", f"/boards/{MARKUP.replace('/', '')}", "/?text=%3Cimg"):
            tab = browser.open(f"{dash.url}{path}")
            tab.until("document.querySelector('main')?.innerText.length > 10")
            assert tab.value("document.querySelectorAll('img, script:not([src])').length") == 0
            assert "taken" not in tab.value("document.title").replace(MARKUP, "")


def test_a_run_is_stopped_by_whoever_opens_the_address_with_the_token(browser: Browser, home: Path) -> None:
    with Dashboard(home, "--actions") as dash:
        tab = opened(browser, dash, "/runs/digits")
        tab.until("document.querySelector('.buttons button')?.disabled")
        assert "--actions" in tab.text
        tab = opened(browser, dash, f"/runs/digits#token={dash.token}")
        tab.until("document.querySelector('.buttons button')?.disabled === false")
        assert tab.value("location.hash + document.cookie") == ""
        assert tab.value("document.querySelector('.buttons').innerText") == "Resume this run"  # nobody serves the home
        tab = opened(browser, dash, "/runs/digits")
        tab.until("document.querySelector('.buttons button')?.disabled === false")
        tab.value("confirm = () => true; document.querySelector('.buttons button').click()")
        tab.until("document.querySelector('.notice.bad:not([hidden])')?.textContent.includes('fedquilt resume')")


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_rollouts_show_who_has_them_and_why_some_have_not(
    browser: Browser, shown: Dashboard, size: tuple[int, int]
) -> None:
    tab = opened(browser, shown, "/rollouts", size)
    assert "2 have it" in tab.value("document.querySelector('.rollouts tbody tr').textContent")
    assert "4 have said nothing" in tab.value("document.querySelector('.rollouts tbody tr').textContent")
    assert "waits for a coordinator" in tab.value("document.querySelector('.rollouts tbody tr').textContent")
    link = "document.querySelectorAll('.rollouts tbody tr')[1].querySelector('a')"
    tab = opened(browser, shown, tab.value(f"{link}.getAttribute('href')"), size)
    assert tab.value("document.querySelector('.notice.bad').textContent") == "2 of 2 boards failed"
    row = tab.value("document.querySelector('[data-key=board-00000]').innerText")
    assert "3 points less" in row
    assert "91.0 % (before 94.0 %)" in row
    assert "12.3 ms" in row
    tile = "[...document.querySelectorAll('.tiles div')].find((each) => each.firstChild.textContent === '{}')"
    begun, lasted = (tab.value(f"{tile.format(name)}.lastChild.textContent") for name in ("begun", "lasted"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", begun)  # an ended rollout has no age
    assert re.fullmatch(r"\d+ s", lasted)
    assert "aborted: 2 of 2 boards failed" in tab.text
    assert fine(tab)


def test_a_rollout_is_ended_by_whoever_opens_the_address_with_the_token(browser: Browser, home: Path) -> None:
    with Store(home) as store:
        id = store.rollouts.find_rollout(ROLLED).state.id
    with Dashboard(home, "--actions") as dash:
        tab = opened(browser, dash, f"/rollouts/{id}")
        tab.until("document.querySelector('.buttons button')?.disabled")
        tab = opened(browser, dash, f"/rollouts/{id}#token={dash.token}")
        tab.until("document.querySelector('.buttons button')?.disabled === false")
        assert tab.value("document.querySelector('.buttons').innerText") == "Take this rollout back"
        tab.value("confirm = () => true; document.querySelector('.buttons button').click()")
        tab.until("document.querySelector('.notice:not([hidden])')?.textContent.includes('is aborted as soon as')")
        tab.until("document.querySelector('main').textContent.includes('its return is requested')")
        with Store(home) as store:
            assert store.rollouts.find_rollout(id).revert_requested


def test_what_goes_away_while_it_is_watched_is_said(browser: Browser, home: Path) -> None:
    run = dashes.add_run(home, dashes.facts(dashes.names(5), ended=True), "leaves", "stopped")
    with Dashboard(home) as dash:
        tab = opened(browser, dash, f"/runs/{run}")
        with Store(home) as store:
            remove_runs(store, [run])
        tab.until("document.querySelector('.notice.bad:not([hidden])')?.textContent.includes('no run')")
        dash.process.kill()
        tab.until("document.querySelector('#link').className === 'dead'")
        tab.until("document.querySelector('.notice.bad:not([hidden])')?.textContent.includes('does not answer')")


def test_the_keyboard_reaches_everything(browser: Browser, home: Path) -> None:
    with Dashboard(home) as dash:
        tab = opened(browser, dash, "/")
        seen = []
        for _ in range(16):
            for kind in ("keyDown", "keyUp"):
                tab.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
            told = "(document.activeElement.textContent || document.activeElement.placeholder).slice(0, 20)"
            seen.append(tab.value(told))
            assert tab.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert seen[:6] == ["Skip to the content", "Fleet", "Runs", "Rollouts", "Log", "all boards40"]
        assert "name, board, job" in seen
        assert "grid" in seen


def test_ages_count_every_second_and_show_seconds(browser: Browser, home: Path) -> None:
    with Dashboard(home) as dash:
        tab = opened(browser, dash, "/rollouts")
        age = "document.querySelector('.rollouts tbody tr time').textContent"
        first = tab.value(age)
        assert re.fullmatch(r"(\d+ min )?\d+ s ago", first)
        tab.until(f"{age} !== {first!r}")
        path = tab.value("document.querySelector('link[href$=\"dom.js\"]').getAttribute('href')")
        durations = f"import('{path}').then((dom) => [59, 60, 3725, 90000].map(dom.duration).join())"
        assert tab.value(durations) == "59 s,1 min 0 s,1 h 2 min,1 d 1 h"
