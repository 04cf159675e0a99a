"""Settings from the coordinator: what agent.toml allows, at once, kept over restarts, and taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedquilt.core import JobError, ModelError, StoreError
from fedquilt.edge_agent import settings as agents
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.upgrade.remote_settings import FILE, SettingsKind, apply_remote_settings, parse_remote_settings
from fedquilt.host.disk import Disk
from fedquilt.wire import DesiredRelease

MEMORY = 8_000_000_000
OWN = {
    "device": "d",
    "home": "h",
    "budget": "2GB",
    "labels": ["site=lab", "old"],
    "governor": {"max_w": 15.0, "policy": "board"},
}


def applied(given: dict[str, Any], **own: Any) -> AgentSettings:
    return apply_remote_settings(agents.parse_settings({**OWN, **own}), given, MEMORY)


def test_what_is_set_takes_the_place_of_agent_toml() -> None:
    made = applied({"budget": "1GB", "policy": "energy", "max_w": 10.0, "telemetry_s": 5.0, "labels": ["a", "b"]})
    assert (made.budget, made.governor.policy, made.governor.max_w, made.telemetry_s) == ("1GB", "energy", 10.0, 5.0)
    assert made.labels == ("a", "b")
    assert applied({}) == agents.parse_settings(OWN)


def test_labels_are_added_and_taken_away() -> None:
    assert applied({"labels": ["+canary", "-old", "+site=lab"]}).labels == ("site=lab", "canary")
    with pytest.raises(JobError, match="mixes changes with full labels"):
        applied({"labels": ["+canary", "old"]})
    with pytest.raises(JobError, match="label 'site' is set twice"):
        applied({"labels": ["+site=hall"]})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"budget": "2.1GB"}, "budget = '2.1GB' is above this device's limit of 2000 MB"),
        ({"max_w": 15.5}, "max_w = 15.5 is above this device's limit of 15 W"),
        ({"telemetry_s": 0.5}, "telemetry_s = 0.5"),
        ({"budget": "much"}, "budget: 'much' is not a size"),
        ({"home": "/"}, "home"),
        ({"policy": "fast"}, "policy"),
        ({"labels": ["No Label"]}, "is not a label"),
    ],
)
def test_more_than_agent_toml_allows_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match="(?s)" + said.replace(".", r"\.")):
        applied(given)


def test_without_a_budget_half_of_the_memory_is_the_limit() -> None:
    assert applied({"budget": "4GB"}, budget=None).budget == "4GB"  # half of the board's memory
    with pytest.raises(JobError, match="limit of 4000 MB"):
        applied({"budget": "4.1GB"}, budget=None)


def test_words_are_checked_before_anything_is_sent() -> None:
    for wrong in ({"budget": "1"}, {"labels": ["+x", "y"]}, {"telemetry_s": 0.0}, {"unknown": 1}):
        with pytest.raises(JobError):
            parse_remote_settings(wrong)


class Board:
    """An agent's settings from one process to the next."""

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.taken: list[AgentSettings] = []
        (folder / "h").mkdir(exist_ok=True)
        self.kind = SettingsKind(agents.parse_settings(OWN), MEMORY, folder / "h", self.taken.append, disk or Disk())

    def set(self, serial: int, **settings: Any) -> None:
        release = DesiredRelease(rollout="r", kind="settings", serial=serial, settings=settings)
        self.kind.stage(release, None)
        self.kind.start_check(release)
        assert self.kind.poll_check() is not None
        self.kind.activate(release)


def test_settings_are_taken_at_once_and_kept(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.set(1, budget="1GB")
    assert board.taken[-1].budget == "1GB"
    assert Board(tmp_path).kind.effective_settings().budget == "1GB"
    board.set(2, telemetry_s=5.0)  # all that is set: the budget is agent.toml's again
    assert (board.taken[-1].budget, board.taken[-1].telemetry_s) == ("2GB", 5.0)


def test_settings_are_taken_back_once(tmp_path: Path) -> None:
    board = Board(tmp_path)
    assert not board.kind.roll_back()
    board.set(1, budget="1GB")
    first = board.kind.current_sha256()
    board.set(2, budget="1.5GB")
    board.kind.activate(
        DesiredRelease(rollout="r", kind="settings", serial=2, settings={"budget": "1.5GB"})
    )  # after a kill
    for _ in range(2):
        assert board.kind.roll_back()
    assert (board.taken[-1].budget, board.kind.current_sha256()) == ("1GB", first)
    board.set(3)
    assert board.kind.current_sha256() == ""
    assert board.kind.roll_back()
    assert Board(tmp_path).kind.effective_settings().budget == "1GB"


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    board = Board(tmp_path)
    with pytest.raises(ModelError, match="limit of 2000 MB"):
        board.set(1, budget="3GB")
    assert (board.taken, board.kind.current_sha256()) == ([], "")


def test_an_owner_who_lowers_a_limit_has_the_last_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Board(tmp_path).set(1, budget="2GB")
    own = agents.parse_settings({**OWN, "budget": "1GB"})
    assert SettingsKind(own, MEMORY, tmp_path / "h", lambda given: None).effective_settings() == own
    assert "remote settings are invalid" in caplog.text


def test_a_damaged_file_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board = Board(tmp_path)
    board.set(1, budget="1GB")
    (tmp_path / "h" / FILE).write_bytes(b"spoilt")
    assert Board(tmp_path).kind.effective_settings().budget == "2GB"
    assert "is damaged" in caplog.text


def test_a_full_disk_leaves_what_was_set(tmp_path: Path) -> None:
    class Full(Disk):
        def write_atomically(self, path: object, payload: bytes, *, durable: bool = True) -> None:
            raise OSError(28, "No space left on device")

    Board(tmp_path).set(1, budget="1GB")
    board = Board(tmp_path, Full())
    with pytest.raises(StoreError, match="No space left"):
        board.set(2, budget="1.5GB")
    assert board.taken == []
    assert board.kind.effective_settings().budget == "1GB"
