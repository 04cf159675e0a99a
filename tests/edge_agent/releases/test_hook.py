"""The owner's hook after an exchange of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_places import Place, short, told
from waiting import alive, until

from fedquilt.edge_agent.releases.process import HOOK_S, ReleaseHook


def test_the_hook_is_run_after_each_exchange_with_the_models_place(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ("sh", "-c", f'echo "$(readlink "$FEDQUILT_MODELS/current") $FEDQUILT_MODEL" >> {log}')
    place = Place(tmp_path, hook=command)
    first = place.put(1)
    assert told(place) == ""
    second = place.put(2)
    assert told(place) == ""
    place.models.roll_back()
    assert told(place) == ""
    model = place.folder / "current/model.onnx"
    assert log.read_text().splitlines() == [f"{short(each)} {model}" for each in (first, second, first)]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("sh", "-c", "echo starting; echo no such unit >&2; exit 4"), "the hook sh ended with code 4: no such unit"),
        (("sh", "-c", "kill -9 $$"), "the hook sh died of SIGKILL"),
        (("/nowhere/reload",), "the hook /nowhere/reload cannot be started: No such file or directory"),
    ],
)
def test_a_hook_that_fails_is_told_by_name(tmp_path: Path, command: tuple[str, ...], said: str) -> None:
    place = Place(tmp_path, hook=command)
    place.put(1)
    assert told(place) == said


def test_a_hook_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = ("sh", "-c", f"sleep 1000 & echo $! > {pid}.part; mv {pid}.part {pid}; wait")
    place = Place(tmp_path, hook=command)
    place.put(1)
    assert not place.models.is_settled()
    assert place.models.unhealthy_reason() == ""
    sleeper = int(until(lambda: pid.exists() and pid.read_text(), "the hook's child"))
    place.now_s += HOOK_S + 1
    assert told(place) == "the hook sh hung: it was ended after 60 s"
    until(lambda: not alive(sleeper), "the end of what it has started")


def test_no_hook_is_no_matter() -> None:
    none = ReleaseHook(())
    none.start({})
    assert (none.is_running, none.failure) == (False, "")
