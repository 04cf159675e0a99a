"""The story with three boards: all processes and commands are as with eight; its home has what its page says."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.coordinator.fleet.telemetry_store import TelemetryStore
from fedquilt.coordinator.rounds import rollout as rounds_rollout
from fedquilt.coordinator.rounds.rollout import ReleaseOffered, RolloutAborted, StatusReported
from fedquilt.coordinator.storage.reader import StoreReader
from fedquilt.coordinator.storage.rows import is_served
from fedquilt.coordinator.views.run_summary import summarise_events
from fedquilt.core import Examples, JobError
from fedquilt.tools.lab.demo import drift_scenario, report
from fedquilt.tools.lab.demo.console import StoryPrinter
from fedquilt.tools.lab.demo.story import _StoryFleet, _StorySteps

BOARDS = 3
TELL = (
    "import sys; from pathlib import Path; from fedquilt.tools.lab.demo import story; "
    f"sys.exit(story.run_story(Path(sys.argv[1]), boards={BOARDS}))"
)


class Ended:
    """A story that was told."""

    def __init__(self, out: Path) -> None:
        ran = subprocess.run([sys.executable, "-c", TELL, str(out)], capture_output=True, text=True, check=True)
        self.out, self.shown = out, ran.stdout
        self.page = (out / "story.html").read_text(encoding="utf-8")
        self.told: dict[str, Any] = json.loads((out / "story.json").read_text())
        self.home = Path(self.told["home"])
        self.first, self.bad, self.last = (each["id"] for each in self.told["rollouts"])

    def boards(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.told["boards"]}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return Ended(tmp_path_factory.mktemp("story"))


def test_it_shows_commands_and_what_came_of_them_in_eighty_columns(ended: Ended) -> None:
    """Output into a pipe has no colours, and no line is rewritten."""
    lines = ended.shown.replace(str(ended.out), "").splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in ended.shown
    assert "\r" not in ended.shown
    commands = [line.split()[2] for line in lines if line.startswith("$ fedquilt")]
    assert commands == ["run", "deploy", "serve-model", "devices", "deploy", "run", "deploy"]
    assert lines[-1].startswith("page, with plots")


def test_the_bad_model_was_on_the_canary_alone(ended: Ended) -> None:
    """By the log of its rollout, by the answers, and by what boards run at the end."""
    with StoreReader(ended.home) as store:
        facts = [fact for _, _, fact in store.rollouts.read_events(ended.bad)]
        used = report.seconds_in_use(store, ended.bad)
        kept = store.rollouts.find_rollout(ended.bad).state
    offered = [device for fact in facts if isinstance(fact, ReleaseOffered) for device in fact.devices]
    assert len(offered) == 1
    assert any(isinstance(fact, RolloutAborted) for fact in facts)
    assert not any(isinstance(fact, StatusReported) and fact.phase == "committed" for fact in facts)
    assert [each["status"] for each in ended.told["rollouts"]] == ["done", "aborted", "done"]
    boards = ended.boards()
    assert {name: board["bad_s"] for name, board in boards.items() if board["bad_s"] is not None} == used
    assert used.keys() <= set(offered)
    assert all(board["bad_answers"] == 0 for name, board in boards.items() if name not in offered)
    assert kept.heard[offered[0]].phase in rounds_rollout.FAILED
    assert ended.told["reason"] == kept.heard[offered[0]].reason


def test_every_board_runs_the_last_model_and_has_the_first_to_return_to(ended: Ended) -> None:
    boards = ended.boards()
    assert len(boards) == BOARDS
    for name in boards:
        models = ended.home.parent / "boards" / name / "models"
        for link, rollout in (("current", ended.last), ("previous", ended.first)):
            assert json.loads((models / link / "release.json").read_text())["rollout"] == rollout
        assert json.loads((models / "served.json").read_text())["failed"] == 0


def test_what_it_says_of_drift_and_answers_is_what_the_coordinator_was_told(ended: Ended) -> None:
    """Drift is the largest of the readings; accuracy fell and came back in them as it did in the answers."""
    with TelemetryStore(ended.home) as store:
        when = ended.told["began"], ended.told["began"] + ended.told["seconds"]
        found = {each.device: store.load_readings(each.device, *when) for each in store.load_statuses()}
    for name, board in ended.boards().items():
        drifts = [reading.drift for reading in found[name] if reading.drift is not None]
        accuracies = [reading.accuracy for reading in found[name] if reading.accuracy is not None]
        assert board["drift"] == max(drifts) > 0.3
        assert min(accuracies) < board["before"] - 0.1
        assert 0 < max(reading.served or 0 for reading in found[name]) <= board["answers"]
    assert ended.told["before"] > 0.95
    assert ended.told["dropped"] < 0.8
    assert ended.told["after"] > 0.9
    assert ended.told["failed"] == 0


def test_joules_and_bytes_are_those_of_the_runs_and_the_models(ended: Ended) -> None:
    with StoreReader(ended.home) as store:
        wholes = [summarise_events(store.find_job(run).job, store.read_events(run)).total for run in ended.told["runs"]]
        kept = [store.rollouts.find_rollout(each).state for each in (ended.first, ended.bad, ended.last)]
    models = sum(each.plan.blob.size * len(each.offered) for each in kept if each.plan.blob is not None)
    assert ended.told["energy_j"] == pytest.approx(sum(whole.energy_j or 0.0 for whole in wholes))
    assert ended.told["moved_bytes"] == sum(whole.down_bytes + whole.up_bytes for whole in wholes) + models
    assert all(whole.tasks for whole in wholes)


def test_the_page_says_it_all_without_a_script(ended: Ended) -> None:
    assert "<script" not in ended.page
    for name in ended.boards():
        assert name in ended.page
    for value in (ended.told["before"], ended.told["dropped"], ended.told["after"]):
        assert f"{100 * value:.1f} %" in ended.page
    assert f"<dd>{ended.told['seconds'] / 60:.1f}</dd>" in ended.page
    assert f"<dd>{ended.told['energy_j']:.1f}</dd>" in ended.page
    assert f"<dd>{ended.told['moved_bytes'] / 1e6:.1f}</dd>" in ended.page
    right, drift = re.findall(r'<svg[^>]*aria-label="([^"]+)"', ended.page)
    assert right.startswith("Right answers, by the labels")
    assert drift.startswith("Drift of the inputs")
    assert "inputs change at 0" in right
    assert all(f"fedquilt {word} " in ended.page for word in ("run", "deploy", "serve-model", "devices"))


def test_nothing_of_it_runs_on(ended: Ended) -> None:
    assert not is_served(ended.home)


# -- parts of it ----------------------------------------------------------------------------------


def test_no_silence_of_a_story_is_longer_than_five_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """Ticks of 0.4 s on the test's clock, with a sentence now and then."""
    now_s, told_s = [0.0], [0.0]
    teller = StoryPrinter(True, lambda: now_s[0])
    for tick in range(1500):
        now_s[0] = 0.4 * tick
        teller.now = "boards compute"
        teller.show_status()
        if tick % 100 == 0:
            teller.print_event("something")
        if capsys.readouterr().out:
            told_s.append(now_s[0])
    assert max(later - before for before, later in itertools.pairwise([*told_s, 600.0])) <= 5.0


def test_a_process_that_ends_ends_the_story_by_name(tmp_path: Path) -> None:
    """A story does not wait for what a process that is gone would have brought."""
    none = Examples(np.zeros((0, 8, 8), np.uint8), np.zeros(0, np.int64))
    gone = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    gone.wait()
    store: Any = None
    fleet = _StoryFleet(tmp_path, (), store, {"runner-a": gone}, none, none)
    with pytest.raises(JobError, match=r"runner-a has ended with 3: see "):
        _StorySteps(fleet, StoryPrinter(False), 0.0)._wait_until(lambda: False)


def test_changed_images_are_darker_turned_and_the_same_for_a_seed() -> None:
    x = np.zeros((3, 8, 8), np.uint8)
    x[:, 2:6, 3] = 240
    made = drift_scenario.degrade_images(x, 1)
    assert (made.shape, made.dtype) == (x.shape, x.dtype)
    assert made.max() < 0.7 * x.max()
    assert np.array_equal(made, drift_scenario.degrade_images(x, 1))
    assert not np.array_equal(made, drift_scenario.degrade_images(x, 2))
