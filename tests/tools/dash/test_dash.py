"""A dashboard as a process: what it shows, and what it refuses."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dashes
import pytest
from dashes import Dashboard
from waiting import wait_until

from fedquilt import cli
from fedquilt.coordinator.rounds.rollout import RolloutCompleted
from fedquilt.coordinator.storage.store import Store

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'fedquilt[web]'")

DEVICES = dashes.names(40)
TABLES = "tables-20261123-041500-1a2b3c"
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("watched") / "runs"
    dashes.add_run(home, dashes.facts(DEVICES, ended=True), "leaves", "stopped")
    run = dashes.add_run(home, dashes.facts(DEVICES))
    dashes.add_boards(home, DEVICES, run)
    return home


@pytest.fixture(scope="module")
def dash(home: Path) -> Iterator[Dashboard]:
    with Dashboard(home) as dash:
        yield dash


# -- what it shows --


def test_every_page_and_its_files_are_there(dash: Dashboard) -> None:
    for path in ("/", "/runs", "/runs/digits", "/rollouts", "/boards/board-00001", "/log"):
        status, headers, body = dash.ask(path)
        assert status == 200
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert b"://" not in body
    files = re.findall(r'(?:href|src)="(/static/[^"]+)"', body.decode())
    assert len(files) == 12
    seen: set[str] = set()
    while files:
        path = files.pop()
        seen.add(path)
        status, headers, body = dash.ask(path)
        assert status == 200
        assert "immutable" in headers["cache-control"]
        text = body.decode()
        assert set(re.findall(r"https?://[^\"']+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        if path.endswith(".js"):
            inner = {f"{path.rpartition('/')[0]}/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
            files += sorted(inner - seen - set(files))
    assert len(seen) == 12


@pytest.mark.parametrize(
    ("query", "count", "first"),
    [
        ("", 40, "board-00000"),
        ("state=offline", 8, "board-00000"),
        ("state=working", 5, "board-00001"),
        ("label=site=lab", 20, "board-00001"),
        ("label=!site=lab&state=online", 16, "board-00002"),
        ("text=00017", 1, "board-00017"),
        ("text=RASPBERRY", 40, "board-00000"),
        ("sort=-name", 40, "board-00039"),
        ("sort=-watts", 40, "board-00006"),
        ("text=nobody", 0, None),
    ],
)
def test_boards_are_chosen_and_sorted(dash: Dashboard, query: str, count: int, first: str | None) -> None:
    told = dash.values(f"/api/fleet?{query}")
    assert told["found"] == count
    assert (told["boards"][0]["device"] if told["boards"] else None) == first
    assert told["counts"]["all"] == 40
    grid = dash.values(f"/api/fleet?{query}&view=grid")
    assert [each[0] for each in grid["boards"]] == [each["device"] for each in told["boards"]]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/fleet?state=asleep", 409, "unknown state 'asleep'"),
        ("/api/fleet?label=Lab%20One", 409, "is not a label or !label"),
        ("/api/fleet?sort=colour", 409, "unknown sort key 'colour'"),
        ("/api/fleet?page=-1", 409, "is not a whole number"),
        ("/api/boards/board-00001?span=9y", 409, "unknown span '9y'"),
        ("/api/runs/nothing", 404, "no run 'nothing'"),
        ("/api/runs/digits/why?round=99", 409, "no round 99: choose one of 1 to 3"),
        ("/api/log?run=nothing", 404, "no run"),
        ("/api/nothing", 404, "Not Found"),
        ("/static/000000000000/../guard.py", 404, "Not Found"),
        ("/static/%2e%2e/guard.py", 404, "Not Found"),
        (f"/api/fleet?text={'x' * 3000}", 403, "query is too long"),
    ],
)
def test_what_is_not_there_is_refused_by_name(dash: Dashboard, path: str, status: int, says: str) -> None:
    found, said = dash.problem(path)
    assert (found, says in said) == (status, True), said


def test_a_stranger_finds_why_a_board_was_not_asked_in_a_round(dash: Dashboard) -> None:
    told = dash.values("/api/runs/digits/why?round=2&text=board-00005")
    assert [(each["device"], each["text"]) for each in told["devices"]] == [("board-00005", "offline")]
    told = dash.values("/api/runs/digits/why?round=2&code=drawn")
    assert told["found"] == 16
    assert re.fullmatch(r"not drawn: place \d+ of 32, 16 selected", told["devices"][0]["text"])
    board = dash.until("/api/boards/board-00005", lambda told: len(told["turns"]) == 6)
    assert [turn["text"] for turn in board["turns"]] == ["offline"] * 6
    assert len(dash.values("/api/boards/board-00001")["readings"]) >= 1
    assert "no device 'nobody'" in dash.problem("/api/boards/nobody")[1]


def test_runs_show_figures_and_who_works(dash: Dashboard) -> None:
    told = dash.until("/api/runs", lambda told: all("done" in run for run in told["runs"]))
    digits, leaves = told["runs"]
    assert (digits["name"], digits["status"], digits["done"]) == ("digits", "interrupted", 2)
    assert (leaves["name"], leaves["status"], leaves["done"]) == ("leaves", "stopped", 3)
    assert digits["now"]["waits"].startswith("its interrupted coordinator: `fedquilt serve --home ")
    assert digits["now"]["asked"] == [name for name in DEVICES if int(name[-2:]) % 5][1:16]
    run = dash.values("/api/runs/digits")
    assert run["fact_at"] < dash.values("/api/runs?later")["at"] <= dash.values("/api/runs/digits?later")["at"]
    assert [row["down_bytes"] for row in run["table"]] == [45_000_000, 45_000_000]
    assert [row["accuracy"] for row in run["table"]] == [pytest.approx(0.3), None]


def test_the_log_is_bounded_and_filtered(dash: Dashboard) -> None:
    told = dash.until("/api/log?kind=TaskDeclined", lambda told: told["found"] == 5)
    assert {line["kind"] for line in told["lines"]} == {"TaskDeclined"}
    assert dash.values("/api/log?run=leaves&text=QUORUM")["found"] == 0
    assert dash.values("/api/log?run=digits&device=board-00001")["lines"][0]["text"].startswith(
        "round 3: update from board-"
    )


# -- what it refuses --


def test_a_dashboard_that_only_shows_does_nothing(dash: Dashboard) -> None:
    assert not (dash.home / "dash.token").exists()
    assert dash.values("/api/session") == {**dash.values("/api/session"), "actions": False, "proof": None}
    status, told = dash.act("digits", "stop", Origin=dash.url, Cookie="fedquilt-dash=1", X_Fedquilt_Proof="1")
    assert (status, "--actions" in told["problem"]) == (403, True)
    for path in ("/", "/api/fleet", "/api/events"):  # of a name that leads here
        assert dash.problem(path, Host="evil.example")[0] == 403


def test_a_link_from_another_site_opens_a_page_and_posts_nothing(dash: Dashboard) -> None:
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Referer": "http://wiki.example/"}
    assert dash.ask("/runs/digits", **link)[0] == 200
    status, told = dash.act("digits", "stop", Origin="http://wiki.example", **link)
    assert (status, "another site" in told["problem"]) == (403, True)


def test_ending_a_rollout_needs_the_token_the_page_and_the_proof(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    replaced = dashes.add_rollout(home, DEVICES)
    with Store(home) as store:
        store.rollouts.append_events([(replaced, RolloutCompleted())])
    ended = dashes.add_rollout(home, DEVICES, TABLES, bad=True)
    id = dashes.add_rollout(home, DEVICES, MARKUP)
    with Dashboard(home, "--actions") as dash:
        own = {"Cookie": dash.cookie(dash.token).partition(";")[0], "Origin": dash.url}
        proof = {"X_Fedquilt_Proof": json.loads(dash.ask("/api/session", **own)[2])["proof"]}
        ask = f"/api/rollouts/{id}/back"
        for refused in ({}, own, {**proof, "Origin": dash.url}, {**own, **proof, "Origin": "http://evil.example"}):
            assert dash.ask(ask, "POST", **refused)[0] == 403
        with Store(home) as store:
            assert not store.rollouts.find_rollout(id).revert_requested
        assert dash.ask(ask, "POST", **own, **proof)[0] == 200
        with Store(home) as store:
            assert store.rollouts.find_rollout(id).revert_requested
        conflicts = ((ended, "back", 409), (replaced, "back", 409))
        for of, what, status in (*conflicts, ("no", "back", 404), (id, "x", 404)):
            assert dash.ask(f"/api/rollouts/{of}/{what}", "POST", **own, **proof)[0] == status
        with Store(home) as store:
            assert not store.rollouts.find_rollout(replaced).revert_requested
        assert dash.problem("/api/rollouts/nothing")[0] == 404
        listed = dash.values("/api/rollouts")["rollouts"]
        assert [each["rollout"] for each in listed] == [id, ended, replaced]
        assert [each["name"] for each in listed[:2]] == [MARKUP, TABLES]
        nobody = f"a coordinator: start one with `fedquilt serve --home {home}`"
        assert [each["waits"] for each in listed] == [nobody, "", ""]
        assert [dash.values(f"/api/rollouts/{each}")["waits"] for each in (id, ended)] == [nobody, ""]
        assert dash.values(f"/api/rollouts/{ended}")["steps"][-1]["text"].startswith("aborted: 2 of 2 boards failed")


def test_stopping_needs_the_token_the_page_and_the_proof(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    run = dashes.add_run(home, dashes.facts(DEVICES))
    with Dashboard(home, "--actions") as dash:
        file = home / "dash.token"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.read_text().strip() == dash.token
        assert dash.said.count(dash.token) == 1
        for body, status in (('{"token": "wrong"}', 403), ("[]", 403), ("", 403), ("x" * 5000, 413)):
            assert dash.ask("/api/session", "POST", body, Origin=dash.url)[0] == status
        good = json.dumps({"token": dash.token})
        assert dash.ask("/api/session", "POST", good)[0] == 403
        assert dash.ask("/api/session", "POST", good, Origin="http://evil.example")[0] == 403
        cookie = dash.cookie(dash.token)
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        own = {"Cookie": cookie.partition(";")[0]}
        proof = {"X_Fedquilt_Proof": json.loads(dash.ask("/api/session", **own)[2])["proof"]}
        assert dash.values("/api/session")["proof"] is None
        here = {"Origin": dash.url}
        for refused in (
            {},
            here,
            {**here, **own},
            {**here, **proof},
            {**own, **proof},
            {**own, **proof, "Origin": "http://evil.example"},
            {**own, **proof, **here, "Sec_Fetch_Site": "cross-site"},
            {**own, **here, "X_Fedquilt_Proof": dash.token},
        ):
            assert dash.act(run, "stop", **refused)[0] == 403
        with Store(home) as store:
            assert store.stored_status(run) == "running"
        assert dash.act(run, "delete", **own, **proof, **here)[0] == 404
        assert dash.act("nothing", "stop", **own, **proof, **here)[0] == 404
        assert dash.act(run, "approve", **own, **proof, **here)[0] == 409  # it waits for nobody
        with Store(home) as store:
            store.set_status(run, "waiting for approval")
        assert dash.act(run, "approve", **here)[0] == 403
        assert dash.act(run, "approve", **own, **proof, **here)[0] == 200
        with Store(home) as store:
            assert store.stored_status(run) == "queued"
            store.set_status(run, "running")
        status, told = dash.act(run, "stop", **own, **proof, **here)
        assert (status, "no coordinator was running" in told["said"]) == (200, True)
        assert dash.act(run, "stop", **own, **proof, **here)[0] == 409
        status, told = dash.act(run, "resume", **own, **proof, **here)
        assert (status, "fedquilt resume" in told["problem"]) == (409, True)  # nobody serves the home
        with Store(home) as store:
            assert store.acquire_lock()
            assert store.stored_status(run) == "stopped"
            assert dash.act(run, "resume", **own, **proof, **here)[0] == 200
            assert store.stored_status(run) == "running"
        assert dash.said.count(dash.token) == 1


def test_a_token_never_goes_to_the_journal(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    dashes.add_run(home, dashes.facts(DEVICES))
    command = [
        sys.executable,
        "-m",
        "fedquilt.cli",
        "dash",
        "--home",
        str(home),
        "--listen",
        "127.0.0.1:0",
        "--actions",
    ]
    log = tmp_path / "journal"
    with log.open("wb") as out:
        found = os.fstat(out.fileno())
        environment = {**os.environ, "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        with subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment) as process:
            wait_until(
                lambda: "#token=" in log.read_text() or process.poll() is not None, "its address", dashes.LIMIT_S
            )
            process.kill()
    said, token = log.read_text(), (home / "dash.token").read_text().strip()
    assert f"#token=WORD, the word in {home / 'dash.token'}\n" in said
    assert token not in said


def test_streams_of_changes_are_limited_for_each_address_and_in_all(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    Store(home).close()
    (home / "limits.toml").write_text("[http]\nconnections = 8\nper_address = 4\n")
    with Dashboard(home) as dash, contextlib.ExitStack() as stack:

        def stream(address: str) -> http.client.HTTPResponse:
            link = http.client.HTTPConnection(
                "127.0.0.1", dash.port, timeout=dashes.LIMIT_S, source_address=(address, 0)
            )
            stack.callback(link.close)
            link.request("GET", "/api/events")
            told = link.getresponse()
            stack.callback(told.close)
            return told

        greedy = [stream("127.0.0.2") for _ in range(5)]
        assert [told.status for told in greedy] == [200] * 4 + [503]
        other = [stream("127.0.0.3") for _ in range(4)]
        assert [told.status for told in other] == [200] * 4
        third = stream("127.0.0.4")
        assert (third.status, third.readline()[:16]) == (200, b'data: {"boards":')
        assert greedy[0].readline().startswith(b'data: {"boards":')
        assert b"" in [greedy[0].readline() for _ in range(4)]  # the oldest of the addresses that have most ends


# -- how it is begun --


def test_what_cannot_be_served_is_said(
    tmp_path: Path, home: Path, dash: Dashboard, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["dash", "--home", str(tmp_path)]) == 6
    assert "no runs in" in capsys.readouterr().err
    assert cli.main(["dash", "--home", str(home), "--listen", "8080"]) == 2
    assert "HOST:PORT" in capsys.readouterr().err
    assert cli.main(["dash", "--home", str(home), "--listen", f"127.0.0.1:{dash.port}"]) == 2
    assert "choose another address" in capsys.readouterr().err
