"""Models on a real disk: laid, exchanged, undone; the owner's hook, the runner, and what is left alone."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import msgspec
import pytest
from linear_models import network
from model_places import Place, short, told
from msgspec.structs import replace
from waiting import is_running, wait_until

from fedquilt.core import ModelError
from fedquilt.edge_agent.releases.models import ModelReleases
from fedquilt.edge_agent.releases.process import HOOK_S, ReleaseHook
from fedquilt.edge_agent.releases.release_kind import CheckResult
from fedquilt.edge_agent.task.protocol import ProgressReport, WorkResult
from fedquilt.wire import DesiredRelease, ReleaseLimits


@pytest.mark.parametrize("damage", ["[]", '{"model": 3}', "", None])
def test_a_model_whose_release_json_is_damaged_is_known_by_its_file(place: Place, damage: str | None) -> None:
    first = place.put(1)
    assert first.blob is not None
    note = place.folder / "current/release.json"
    note.unlink()
    if damage is not None:
        note.write_text(damage)
    started = ModelReleases(place.settings, place.board, place.checks, clock=lambda: place.now_s)
    assert started.current_sha256() == first.blob.sha256
    second, blob = place.release(2)
    started.stage(second, blob)
    started.start_check(second)
    assert place.checks.requests[0].current_model == str(place.folder / short(first) / "model.onnx")
    (place.folder / "current/model.onnx").write_bytes(b"another")
    assert ModelReleases(place.settings, place.board, place.checks).current_sha256() == ""


def test_models_lie_beside_each_other_and_two_are_kept(place: Place) -> None:
    first, second, third = (place.put(serial) for serial in (1, 2, 3))
    (place.folder / "labels.txt").write_text("mine")
    (place.folder / "mine").mkdir()
    place.models.discard_unused()
    assert place.names() == sorted([short(second), short(third), "current", "previous", "labels.txt", "mine"])
    assert os.readlink(place.folder / "current") == short(third)
    assert os.readlink(place.folder / "previous") == short(second)
    laid = json.loads((place.folder / "current/release.json").read_text())
    assert laid == {"model": third.blob.sha256, "rollout": "r3", "name": "v3", "serial": 3}
    assert place.models.current_sha256() == third.blob.sha256
    assert place.models.roll_back()
    assert place.models.roll_back()  # again, as after a kill
    place.models.discard_unused()
    assert place.models.current_sha256() == second.blob.sha256
    assert not place.models.roll_back()
    assert short(first) not in place.names()


def test_the_first_model_is_taken_back_to_none(place: Place) -> None:
    place.put(1)
    assert place.models.roll_back()
    place.models.discard_unused()
    assert place.names() == []
    assert place.models.current_sha256() == ""
    assert not place.models.roll_back()


@pytest.mark.parametrize("payload", [b"", b"nonsense", network()[:-9]])
def test_a_file_that_is_no_network_is_refused_before_its_check(place: Place, payload: bytes) -> None:
    first = place.put(1)
    wanted, blob = place.release(2, payload)
    with pytest.raises(ModelError, match=r"model cannot be run: the file (has 0 bytes|is not a valid ONNX file)"):
        place.models.stage(wanted, blob)
    place.models.discard_unused()
    assert place.models.current_sha256() == first.blob.sha256
    assert place.names() == sorted([short(first), "current", "previous"])


def test_a_folder_of_its_own_is_readable_by_its_group(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        own, shared = Place(tmp_path), Place(make(tmp_path / "2"), folder=str(tmp_path / "srv/models"))
        modes = []
        for place in (own, shared):
            wanted, blob = place.release(1)
            blob.chmod(0o600)
            place.models.stage(wanted, blob)
            paths = (place.folder, place.folder / short(wanted), place.folder / short(wanted) / "model.onnx", blob)
            modes.append([stat.S_IMODE(path.stat().st_mode) for path in paths])
    finally:
        os.umask(before)
    assert modes == [[0o700, 0o700, 0o600, 0o600], [0o750, 0o750, 0o640, 0o600]]


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


# -- check ----------------------------------------------------------------------------------------


def begun(place: Place) -> DesiredRelease:
    """A second release whose check has begun."""
    place.put(1)
    wanted, blob = place.release(2)
    place.models.stage(wanted, blob)
    place.models.start_check(wanted)
    assert place.models.poll_check() is None
    return wanted


def test_joules_of_an_answer_are_the_boards_while_answers_were_timed(place: Place) -> None:
    """5 W, as the meter says, for ten answers in two seconds; what comes before and after does not count."""
    begun(place)
    (order,) = place.checks.requests
    assert Path(order.current_model).read_bytes() == network(gain=1)
    assert Path(order.model).read_bytes() == network(gain=2)
    assert order.timing_s > 1  # as there is a meter
    for event, passed_s in (
        (None, 7.0),
        (ProgressReport(0.5), 0.0),
        (None, 1.0),
        (ProgressReport(0.75), 1.0),
        (None, 9.0),
    ):
        place.now_s += passed_s
        place.checks.events = [] if event is None else [event]
        assert place.models.poll_check() is None
    place.checks.events = [WorkResult(metrics={"accuracy": 0.9}, examples=10, peak_bytes=123)]
    verdict = place.models.poll_check()
    assert verdict is not None
    assert verdict.metrics == {"accuracy": 0.9, "energy_j": pytest.approx(1.0), "peak_bytes": 123.0}


def test_the_shape_of_a_release_is_the_one_that_its_check_runs(place: Place) -> None:
    wanted, blob = place.release(1)
    wanted = replace(wanted, input_shape=(3, 48, 192))
    place.models.stage(wanted, blob)
    place.models.start_check(wanted)
    assert [order.input_shape for order in place.checks.requests] == [(3, 48, 192)]


def test_a_check_whose_process_somebody_killed_is_reported(place: Place) -> None:
    begun(place)
    place.checks.events = [WorkResult(code="failed", reason="killed by somebody", killed_externally=True)]
    assert place.models.poll_check() == CheckResult("check failed: killed by somebody", {}, killed_externally=True)


def test_a_check_that_never_ends_is_ended(place: Place) -> None:
    begun(place)
    place.now_s += 10_000.0
    verdict = place.models.poll_check()
    assert verdict is not None
    assert verdict.refusal_reason == "check exceeded its time limit and was stopped"


# -- the runner -----------------------------------------------------------------------------------


def test_a_model_with_which_the_runner_fails_is_ill(place: Place) -> None:
    place.put(1)
    place.served(served=950, failed=50)
    assert place.models.unhealthy_reason() == ""
    place.served(served=1036, failed=64)
    assert place.models.unhealthy_reason() == ""
    place.served(served=1034, failed=66)
    assert place.models.unhealthy_reason() == "the model runner failed 16 of 100 times with this model"


def test_a_few_failures_are_not_the_models(place: Place) -> None:
    place.put(1)
    place.served()
    assert place.models.unhealthy_reason() == ""
    place.served(failed=4)
    assert place.models.unhealthy_reason() == ""
    place.served(failed=5)
    assert place.models.unhealthy_reason() == "the model runner failed 5 of 5 times with this model"


def test_a_runner_that_is_started_anew_counts_from_nothing(place: Place) -> None:
    place.put(1)
    place.served(served=1000, failed=400)
    assert place.models.unhealthy_reason() == ""
    place.served(served=3, failed=5)
    assert place.models.unhealthy_reason() == "the model runner failed 5 of 8 times with this model"


def test_a_runner_that_falls_silent_or_does_not_take_the_model_up_is_ill(place: Place) -> None:
    first = place.put(1)
    place.now_s += 100.0
    assert place.models.unhealthy_reason() == ""
    place.served(served=10)
    assert place.models.unhealthy_reason() == ""
    second = place.put(2)
    place.served(served=11, model=first.blob.sha256)
    assert place.models.unhealthy_reason() == ""
    place.now_s += 50.0
    place.served(served=12, model=first.blob.sha256)
    assert place.models.unhealthy_reason() == "the model runner has not loaded this model and answers with another"
    place.served(served=13, model=second.blob.sha256)
    assert place.models.unhealthy_reason() == ""
    place.now_s += 61.0
    assert place.models.unhealthy_reason() == "the model runner was silent with this model"


def test_a_model_is_not_settled_until_the_runner_that_is_there_has_taken_it_up(place: Place) -> None:
    first = place.put(1)
    assert place.models.is_settled()  # there is no runner
    place.served(served=10)
    place.models.unhealthy_reason()
    second = place.put(2)
    assert not place.models.is_settled()
    place.now_s += 46.0
    place.served(served=11, model=first.blob.sha256)
    assert "has not loaded this model" in place.models.unhealthy_reason()
    assert place.models.is_settled()  # it is waited for no longer
    place.served(served=12, model=second.blob.sha256)
    assert place.models.is_settled()
    place.now_s += 31.0
    assert (place.models.is_settled(), place.models.unhealthy_reason()) == (False, "")
    place.served(served=13)
    assert place.models.is_settled()
    place.now_s += 61.0
    assert place.models.unhealthy_reason() == "the model runner was silent with this model"


def test_a_runner_that_ends_at_the_exchange_has_fallen_silent(place: Place) -> None:
    place.put(1)
    place.served(served=10)
    place.models.unhealthy_reason()
    place.now_s += 20.0
    place.put(2)
    place.now_s += 41.0
    assert place.models.unhealthy_reason() == "the model runner was silent with this model"
    place.served(served=11)
    place.models.unhealthy_reason()
    place.now_s += 31.0
    place.put(3)
    place.now_s += 31.0
    assert place.models.unhealthy_reason() == ""


def watched(place: Place) -> None:
    """Exchange a model that 60 % of the labels agree with for one that may have 10 points less."""
    place.put(1)
    place.served(served=900, accuracy=0.6, labelled=900)
    wanted, blob = place.release(2)
    wanted = msgspec.structs.replace(wanted, limits=ReleaseLimits(min_gain=-0.1))
    place.models.stage(wanted, blob)
    place.models.activate(wanted)


def test_a_model_whose_answers_in_use_are_worse_than_before_is_ill(place: Place) -> None:
    watched(place)
    place.served(served=910)
    assert place.models.unhealthy_reason() == ""
    place.served(served=930, accuracy=0.4, labelled=30)
    assert place.models.unhealthy_reason() == ""
    place.served(served=1000, accuracy=0.3, labelled=100)
    said = "accuracy in use, from 100 labels, is 30.0% after 60.0% with the model before: -30.0 points"
    assert place.models.unhealthy_reason() == f"{said}, at least -10.0 are required"
    place.models.roll_back()
    place.served(served=1100, accuracy=0.3, labelled=200)
    assert place.models.unhealthy_reason() == ""


def test_a_model_is_not_settled_while_labels_may_yet_show_that_it_is_worse(place: Place) -> None:
    watched(place)
    for labelled, accuracy in ((0, None), (30, 0.4), (60, 0.4)):  # 60 labels leave 20 points to chance
        place.now_s += 20.0
        place.served(served=1000 + labelled, accuracy=accuracy, labelled=labelled)
        assert (place.models.is_settled(), place.models.unhealthy_reason()) == (False, "")
    place.served(served=1500, accuracy=0.4, labelled=400)
    assert place.models.unhealthy_reason().startswith("accuracy in use, from 400 labels, is 40.0%")


@pytest.mark.parametrize(("accuracy", "labelled"), [(0.9, 30), (0.55, 500)])
def test_a_model_is_settled_once_labels_show_that_it_keeps_its_limit_or_more_of_them_would_not_help(
    place: Place, accuracy: float, labelled: int
) -> None:
    watched(place)
    place.served(served=1000, accuracy=accuracy, labelled=labelled)
    assert (place.models.is_settled(), place.models.unhealthy_reason()) == (True, "")


def test_labels_that_do_not_arrive_any_more_are_waited_for_a_minute_and_those_that_do_for_a_quarter_of_an_hour(
    place: Place,
) -> None:
    watched(place)
    place.served(served=1000, accuracy=0.5, labelled=30)
    assert not place.models.is_settled()
    place.now_s += 61.0
    place.served(served=1010, accuracy=0.5, labelled=30)
    assert place.models.is_settled()
    for number in range(1, 15):
        place.served(served=1010 + number, accuracy=0.5, labelled=30 + number)
        assert not place.models.is_settled()
        place.now_s += 59.0
    place.now_s += 59.0
    place.served(served=1100, accuracy=0.5, labelled=100)
    assert place.models.is_settled()


@pytest.mark.parametrize("limit", [None, -0.5])
def test_worse_answers_that_the_release_allows_are_no_matter(place: Place, limit: float | None) -> None:
    place.put(1)
    place.served(served=900, accuracy=0.6, labelled=900)
    wanted, blob = place.release(2)
    place.models.stage(wanted, blob)
    place.models.activate(msgspec.structs.replace(wanted, limits=ReleaseLimits(min_gain=limit)))
    place.served(served=1000, accuracy=0.2, labelled=100)
    assert place.models.unhealthy_reason() == ""


@pytest.mark.parametrize("text", ["", "[]", '{"served": -1}', "x" * 100_000, '{"model": "no digest"}'])
def test_a_runners_file_that_is_damaged_says_nothing(place: Place, text: str) -> None:
    place.put(1)
    (place.folder / "served.json").write_text(text)
    assert place.models.runner.read_status() is None
    assert place.models.unhealthy_reason() == ""


def test_an_old_runners_file_says_nothing_until_it_changes(place: Place) -> None:
    place.put(1)
    place.served(at=12.0, served=5)
    assert place.models.runner.read_status() is None
    place.served(at=13.0, served=6)
    found = place.models.runner.read_status()
    assert found is not None
    assert found.served == 6


def test_a_model_that_is_gone_is_ill(place: Place) -> None:
    wanted = place.put(1)
    (place.folder / short(wanted) / "model.onnx").unlink()
    assert place.models.unhealthy_reason().startswith("model file is missing in")


def test_a_pipe_in_the_place_of_the_runners_file_keeps_nobody_waiting(place: Place) -> None:
    place.put(1)
    os.mkfifo(place.folder / "served.json")
    assert place.models.runner.read_status() is None


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
        (("sh", "-c", "echo starting; echo no such unit >&2; exit 4"), "hook sh ended with exit code 4: no such unit"),
        (("sh", "-c", "kill -9 $$"), "hook sh was ended by SIGKILL"),
        (("/nowhere/reload",), "hook /nowhere/reload cannot be started: No such file or directory"),
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
    sleeper = int(wait_until(lambda: pid.exists() and pid.read_text(), "the hook's child"))
    place.now_s += HOOK_S + 1
    assert told(place) == "hook sh was stopped after 60 s"
    wait_until(lambda: not is_running(sleeper), "the end of what it has started")


def test_no_hook_is_no_matter() -> None:
    none = ReleaseHook(())
    none.start({})
    assert (none.is_running, none.failure) == (False, "")
