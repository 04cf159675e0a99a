"""What a dashboard holds of a home, and the values of its pages, without a process or a network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import dashes
import msgspec
import pytest

from fedquilt.coordinator.rounds.events import UpdateAccepted, UpdateRejected
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.storage.suspended_jobs import Suspension
from fedquilt.tools.operations.dash import home_watcher, pages, run_follower
from fedquilt.tools.operations.dash.home_watcher import MAX_ENDED_FOLLOWERS, HomeWatcher, NotFoundError
from fedquilt.tools.operations.dash.run_follower import RunFollower

DEVICES = dashes.names(10)
Told = TypeVar("Told")


def watched(home: Path, ask: Callable[[HomeWatcher], Awaitable[Told]]) -> Told:
    async def asked() -> Told:
        made = HomeWatcher(home)
        try:
            return await ask(made)
        finally:
            made.close()
            made.close_databases()

    return asyncio.run(asked())


def written(made: HomeWatcher, name: str = "runs") -> None:
    made.changes[name] += 1


# -- what is held --


def test_only_the_ended_runs_that_were_asked_for_last_are_held_with_their_details(tmp_path: Path) -> None:
    going = dashes.add_run(tmp_path, dashes.facts(DEVICES), "going")
    facts = dashes.facts(DEVICES, ended=True)
    ended = [dashes.add_run(tmp_path, facts, f"ended-{number}", "stopped") for number in range(MAX_ENDED_FOLLOWERS + 2)]

    async def asked(made: HomeWatcher) -> list[str]:
        for run in (going, *ended, ended[2]):
            await made.load_follower(run)
        return list(made._followers)

    assert watched(tmp_path, asked) == [going, *ended[3:], ended[2]]


def test_the_summary_of_a_run_that_went_on_is_not_that_of_before(tmp_path: Path) -> None:
    facts = dashes.facts(DEVICES, 4, ended=True)
    early = next(place for place, fact in enumerate(facts) if getattr(fact, "round", 0) == 2)
    run = dashes.add_run(tmp_path, facts[:early], status="stopped")

    async def asked(made: HomeWatcher) -> list[Any]:
        assert await made._read_next_log()
        found = [(await made.load_summary(await made.find_run(run)))["done"]]
        with Store(tmp_path) as store:
            for fact in facts[early:]:
                store.append_event(run, fact)
            store.set_status(run, "done")
        written(made)
        found.append(await made.load_summary(await made.find_run(run)))
        assert await made._read_next_log()
        return [*found, (await made.load_summary(await made.find_run(run)))["done"]]

    assert watched(tmp_path, asked) == [2, {}, 4]


def test_of_another_database_in_the_same_place_nothing_is_told_that_was_in_the_first(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    before = dashes.add_run(home, dashes.facts(DEVICES), "before")
    after = dashes.add_run(other, dashes.facts(DEVICES, ended=True), "after")

    async def asked(made: HomeWatcher) -> list[str]:
        await made.load_follower(before)
        os.replace(other / "fedquilt.db", home / "fedquilt.db")
        written(made)
        assert [row.id for row in (await made.load_runs()).rows] == [after]
        await made.load_follower(after)
        return list(made._followers)

    assert watched(home, asked) == [after]


@pytest.mark.parametrize(("old_s", "again"), [(1e9, False), (-1.0, True)])
def test_boards_are_read_again_after_a_while_though_nobody_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_s: float, again: bool
) -> None:
    monkeypatch.setattr(home_watcher, "FLEET_MAX_AGE_S", old_s)
    dashes.add_boards(tmp_path, DEVICES)

    async def asked(made: HomeWatcher) -> bool:
        return await made.load_fleet() is not await made.load_fleet()

    assert watched(tmp_path, asked) is again


# -- what is followed --


def follower(home: Path, facts: list[Any]) -> RunFollower:
    run = dashes.add_run(home, facts)
    with Store(home) as store:
        found = RunFollower(store.find_job(run))
        for dated in store.read_events(run):
            found.add_event(*dated)
    return found


def test_an_update_that_is_refused_counts_as_one_that_was_declined(tmp_path: Path) -> None:
    found = follower(tmp_path, [*dashes.facts(DEVICES), UpdateRejected(2, DEVICES[2], "a value is not finite")])
    assert found.make_summary()["declined"] == 3


def test_plots_of_a_long_run_have_points_from_its_first_round_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = follower(tmp_path, dashes.facts(dashes.names(5), 9, ended=True))
    for drawn, numbers in ((3, [0, 4, 8]), (9, list(range(9)))):
        monkeypatch.setattr(run_follower, "MAX_PLOT_POINTS", drawn)
        assert [row["round"] - found.make_round_rows()[0]["round"] for row in found.make_round_rows()] == numbers


# -- pages --


@pytest.mark.parametrize(
    ("page", "found", "first"), [(0, (1, 3, 100), 0), (1, (1, 3, 100), 0), (3, (3, 3, 50), 200), (99, (3, 3, 50), 200)]
)
def test_a_long_list_comes_page_by_page(tmp_path: Path, page: int, found: tuple[int, int, int], first: int) -> None:
    devices = dashes.names(250)
    dashes.add_boards(tmp_path, devices)
    told = watched(tmp_path, lambda made: pages.load_fleet_page(made, {"page": str(page)}))
    assert (told["page"], told["pages"], len(told["boards"])) == found
    assert told["boards"][0]["device"] == devices[first]


@pytest.mark.parametrize("name", ["aboard", "board-000000", "zeppelin"])
def test_a_board_that_nobody_has_heard_of_is_no_other_board(tmp_path: Path, name: str) -> None:
    dashes.add_boards(tmp_path, DEVICES)
    Store(tmp_path).close()
    with pytest.raises(NotFoundError, match=name):
        watched(tmp_path, lambda made: pages.load_device_page(made, {}, name))


def test_a_round_that_is_over_has_nobody_at_work(tmp_path: Path) -> None:
    run = dashes.add_run(tmp_path, dashes.facts(DEVICES))
    told = [
        watched(tmp_path, lambda made, query=query: pages.load_round_page(made, query, run))
        for query in ({}, {"round": "2"})
    ]
    assert [each["running"] for each in told] == [True, False]
    assert ["at work" in {count["text"] for count in each["counts"]} for each in told] == [True, False]


def test_a_line_of_the_log_is_found_by_its_reasons(tmp_path: Path) -> None:
    facts = dashes.facts(DEVICES)
    last = facts.pop()
    assert isinstance(last, UpdateAccepted)
    noted = msgspec.structs.replace(last, update=msgspec.structs.replace(last.update, note="Forgot its private state"))
    run = dashes.add_run(tmp_path, [*facts, noted])
    told = watched(tmp_path, lambda made: pages.load_log_page(made, {"run": run, "text": "FORGOT"}))
    assert [line["kind"] for line in told["lines"]] == ["UpdateAccepted"]


# -- answers that are kept --


def test_an_answer_is_kept_until_something_changes_and_answers_that_are_kept_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="starlette is not installed: pip install 'fedquilt[web]'")
    from fedquilt.tools.operations.dash import app

    monkeypatch.setattr(app, "RESPONSE_TTL_S", 1e9)
    dashes.add_run(tmp_path, dashes.facts(DEVICES), "first")

    async def asked(made: HomeWatcher) -> None:
        dash = app.Dashboard(made)
        answers = dash.make_app()
        first = await get(answers, "/api/runs")
        assert await get(answers, "/api/runs") == first
        dashes.add_run(tmp_path, dashes.facts(DEVICES), "second")
        written(made)
        told = msgspec.json.decode(await get(answers, "/api/runs"))
        assert [each["name"] for each in told["runs"]] == ["second", "first"]
        for number in range(2 * app.MAX_CACHED_RESPONSES):
            await get(answers, "/api/runs", f"page={number}")
        assert len(dash._responses) <= app.MAX_CACHED_RESPONSES

    watched(tmp_path, asked)


async def get(app: Any, path: str, query: str = "") -> bytes:
    """The body of an answer that an application gives to a GET."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "root_path": ""}
    await app({**scope, "headers": [(b"host", b"localhost")], "scheme": "http", "http_version": "1.1"}, receive, send)
    assert sent[0]["status"] == 200, sent
    return b"".join(message.get("body", b"") for message in sent)


def test_a_run_by_its_jobs_name_is_the_same_page_as_by_its_id(tmp_path: Path) -> None:
    run = dashes.add_run(tmp_path, dashes.facts(DEVICES))

    async def asked(made: HomeWatcher) -> list[dict[str, Any]]:
        return [await pages.load_run_page(made, {}, name) for name in (run, "digits")]

    with Store(tmp_path) as store:
        assert store.acquire_lock()
        store.suspensions.record_suspension(run, Suspension(0.0, 1e12, "the disk gives an error", "its model", 1))
        by_id, by_name = watched(tmp_path, asked)
    assert "the disk gives an error" in by_id["now"]["waits"]
    assert {**by_name, "at": by_id["at"]} == by_id
