"""A dashboard as a process beside a home that is written, damaged, replaced or has a run deleted."""

from __future__ import annotations

import hashlib
import http.client
import os
import signal
import sqlite3
import threading
from pathlib import Path

import dashes
import homes
import pytest
from dashes import Dashboard

from fedquilt import cli
from fedquilt.coordinator.jobs.retention import remove_runs
from fedquilt.coordinator.rounds.events import RoundCommitted
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import scores

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'fedquilt[web]'")

DEVICES = dashes.names(40)


def test_a_run_that_is_deleted_while_it_is_watched(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    run = dashes.add_run(home, dashes.facts(DEVICES, ended=True), "leaves", "stopped")
    dashes.add_run(home, dashes.facts(DEVICES))
    with Dashboard(home) as dash:
        assert dash.values(f"/api/runs/{run}")["status"] == "stopped"
        with Store(home) as store:
            remove_runs(store, [run])
        dash.until("/api/runs", lambda told: [each["name"] for each in told["runs"]] == ["digits"])
        for path in (f"/api/runs/{run}", f"/api/runs/{run}/why", f"/api/log?run={run}"):
            assert dash.problem(path) == (404, f"no run {run!r} in {home}")


@pytest.mark.parametrize("has_boards", [False, True])
def test_it_opens_on_the_newest_run_where_there_are_no_boards(tmp_path: Path, has_boards: bool) -> None:
    home = tmp_path / "runs"
    dashes.add_run(home, dashes.facts(DEVICES, ended=True), "first", "done")
    run = dashes.add_run(home, dashes.facts(DEVICES, ended=True), "second", "failed")
    if has_boards:
        dashes.add_boards(home, DEVICES)
    with Dashboard(home) as dash:
        status, headers, _ = dash.ask("/")
        assert (status, headers["location"]) == ((200, None) if has_boards else (307, f"/runs/{run}"))
        assert dash.ask("/boards")[0] == 200


def test_list_page_and_command_have_the_held_out_and_the_test_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "runs"
    run = dashes.add_run(home, dashes.facts(DEVICES, ended=True), status="done")
    with Store(home) as store:
        row = store.find_job(run)
    stored = scores.RunScores(scores.read_scores(home, row).test, (scores.EvaluationScore(3, 0.25, 8),))
    scores.write_scores(scores.scores_path(home, run), stored)
    assert cli.main(["ls", "--home", str(home)]) == 0
    head, line = capsys.readouterr().out.splitlines()[:2]
    assert head.split()[3:5] == ["held-out", "test"]
    assert line.split()[3:7] == ["40.0", "%", "25.0", "%"]
    with Dashboard(home) as dash:
        dash.until("/api/runs", lambda told: "done" in told["runs"][0])
        for values in (dash.values("/api/runs")["runs"][0], dash.values(f"/api/runs/{run}")):
            assert values["metric"] == {"title": "accuracy", "share": True, "held_out": 0.4, "test": 0.25}


def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    ids = [dashes.add_run(home, dashes.facts(DEVICES), name) for name in ("first", "second", "third")]
    with sqlite3.connect(home / "fedquilt.db") as db:
        db.execute("update facts set body = replace(body, 'memory', 'memorx') where job = ?", (ids[0],))
        db.execute("update jobs set status = 'done' where id = ?", (ids[1],))
    db.close()
    with Dashboard(home) as dash:
        told = dash.until(
            "/api/runs", lambda told: sum("problem" in each or "done" in each for each in told["runs"]) == 3
        )
        problems = [each.get("problem", "") for each in told["runs"]]
        assert not problems[0]
        assert "does not match its checksum" in problems[1]
        assert "event before it" in problems[2] or "does not match its checksum" in problems[2]
        assert dash.problem(f"/api/runs/{ids[0]}")[0] == 409
        assert dash.values(f"/api/runs/{ids[2]}")["done"] == 2


def test_a_database_that_is_no_database(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    dashes.add_run(home, dashes.facts(DEVICES))
    dashes.add_boards(home, DEVICES)
    with Dashboard(home) as dash:
        for name, path in (("fedquilt.db", "/api/runs"), ("boards.db", "/api/fleet")):
            dash.values(path)
            (home / name).rename(home / "good")
            for end in ("-wal", "-shm"):
                (home / f"{name}{end}").unlink(missing_ok=True)
            (home / name).write_bytes(b"no database at all" * 1000)
            dash.until_status(path, 503)
            (home / "good").replace(home / name)
            dash.until_status(path, 200)


def test_a_home_that_is_written_while_it_is_read(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    found = dashes.facts(DEVICES, 9)
    run = dashes.add_run(home, found[:2])
    written: list[int] = []

    def write() -> None:
        with Store(home, durable=False) as store:
            for fact in found[2:]:
                store.append_event(run, fact)
                written.append(1)

    with Dashboard(home) as dash:
        writer = threading.Thread(target=write)
        writer.start()
        asked = 0
        while writer.is_alive():
            told = dash.values(f"/api/runs/{run}?asked={asked}")
            assert all(row["participants"] == 15 for row in told["table"])
            asked += 1
        writer.join()
        assert len(written) == len(found) - 2
        assert dash.until(f"/api/runs/{run}", lambda told: told["done"] == 8)["now"]["answered"] == 1
    with Store(home) as store:
        assert len(list(store.read_events(run))) == len(found)


def digests(home: Path) -> dict[str, str]:
    files = [path for path in home.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.stat().st_size}


def test_it_writes_nothing(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    dashes.add_run(home, dashes.facts(DEVICES, ended=True), "leaves", "stopped")
    dashes.add_boards(home, DEVICES)
    before = digests(home)
    with Dashboard(home) as dash:
        for path in ("/api/fleet", "/api/boards/board-00001", "/api/runs", "/api/runs/leaves", "/api/runs/leaves/why"):
            dash.values(path)
        status, headers, body = dash.ask("/api/runs/leaves/report")
        assert (status, b"</html>" in body) == (200, True)
        (policy,) = headers.get_all("content-security-policy") or []
        assert "sandbox" in policy
        assert dash.problem("/api/runs/nothing/report")[0] == 404
        dash.process.send_signal(signal.SIGTERM)
        assert dash.process.wait(timeout=dashes.LIMIT_S) == 0
    assert digests(home) == before


def test_a_run_goes_on_when_it_is_killed(tmp_path: Path) -> None:
    watched, alone = homes.Federation(tmp_path / "watched").create(), homes.Federation(tmp_path / "alone").create()
    alone.run()
    with Dashboard(tmp_path / "watched" / "coordinator") as dash:

        def look(fact: object) -> bool:
            if isinstance(fact, RoundCommitted) and fact.round == 2:
                dash.until("/api/runs", lambda told: told["runs"][0].get("done", 0) >= 2)
                begun = http.client.HTTPConnection("127.0.0.1", dash.port)
                begun.request("GET", "/api/runs/sim/report")  # nobody reads the answer
                os.kill(dash.process.pid, signal.SIGKILL)
                dash.process.wait()
                begun.close()
            return False

        watched.run(look)
        assert dash.process.returncode == -signal.SIGKILL
    assert watched.states() == alone.states()
