"""Boards whose new version cannot start: agents on virtual time, whose launcher is called as its unit would."""

from __future__ import annotations

from pathlib import Path

import upgrades
from one_agent import Site

from fedquilt.core import BlobRef
from fedquilt.edge_agent import settings as agents
from fedquilt.edge_agent.upgrade import launcher
from fedquilt.edge_agent.upgrade.agent_release import AgentKind, LaunchInfo
from fedquilt.edge_agent.upgrade.launcher import VersionChoice
from fedquilt.wire import DesiredRelease, ReleaseStatus

BOARDS, RESTART_S, FLASHED = 2, 10.0, "f"


class Board:
    """One board: its agent, or between two starts nobody.

    Args:
        starts: whether the new version starts; else it ends at once, each time.
        loses: it is killed so many seconds after each of its starts.
    """

    def __init__(self, folder: Path, starts: bool) -> None:
        self.versions, self.starts = folder / "versions", starts
        self.site = Site(folder)
        self.begun: list[str] = []  # versions that were started, in order
        self.asked = False
        self.start()

    def start(self) -> None:
        """What the unit does: the launcher decides, and what it chooses runs or ends at once."""
        while True:
            before = launcher.read_choice(self.versions)
            choice, _ = launcher.choose_version(before, FLASHED, "boot", self.site.broker.now_s, self.versions)
            if before is not None and choice != before:
                launcher.write_choice(self.versions, choice)
            self.begun.append(choice.current)
            if not choice.current or self.starts:
                break
            self.site.broker.now_s += RESTART_S
        self.asked = False
        settings = agents.parse_settings({"device": "d", "home": "elsewhere", "upgrade": {"unsigned": True}})
        started = LaunchInfo(str(self.versions), FLASHED, choice.current, ("agent",))
        make = ("sh", "-c", f"cat > /dev/null; mkdir -p {self.made}/bin; touch {self.made}/bin/python")
        self.site.kinds["agent"] = AgentKind(
            started, settings, lambda: self.site.own.connected, self.end, cancel_alarm=lambda: None, command=make
        )
        self.site.start()

    @property
    def made(self) -> Path:
        """The environment of the bundle that is sent."""
        return self.versions / self.blob.sha256 if hasattr(self, "blob") else self.versions

    def end(self) -> None:
        """The agent asks for the end of its process."""
        self.asked = True

    def upgrade(self, bundle: bytes) -> None:
        """Publish a release, and let the board do what follows from it."""
        self.blob: BlobRef = self.site.depot.store_bytes(bundle)
        self.site.agent.shut_down()
        self.start()
        release = DesiredRelease(rollout="r", kind="agent", serial=1, blob=self.blob, name=upgrades.NEW, soak_s=20.0)
        self.site.say("agent", release, retain=True)

    def settle(self) -> ReleaseStatus:
        """Go on until the release has come to its end; what is told last."""
        for _ in range(200):
            self.site.run(1.0)
            if self.asked:
                self.site.agent.shut_down()
                self.start()
            told: list[ReleaseStatus] = self.site.all("installed")
            if told and told[-1].phase in ("committed", "refused", "returned") and not self.asked:
                return told[-1]
        raise AssertionError(f"it has not come to an end: {self.site.all('installed')[-1:]}")


def test_boards_return_by_themselves_from_a_version_that_cannot_start(tmp_path: Path) -> None:
    file = upgrades.pack(tmp_path / "bundle.tar", [upgrades.toy(tmp_path / "house")])
    told: list[ReleaseStatus] = []
    for number in range(BOARDS):
        board = Board(tmp_path / f"board-{number}", starts=False)
        board.upgrade(file.read_bytes())
        told.append(board.settle())
        new = board.blob.sha256
        assert board.begun == ["", "", new, new, new, ""]
        choice = launcher.read_choice(board.versions)
        assert choice is not None
        assert (choice.current, choice.failed, choice.trying) == ("", new, False)
        assert not (board.versions / new).exists()
    assert {(each.phase, each.reason, each.current) for each in told} == {
        ("returned", "it ended 3 times before it was confirmed", "")
    }


def test_a_version_that_starts_and_is_online_is_kept(tmp_path: Path) -> None:
    board = Board(tmp_path, starts=True)
    file = upgrades.pack(tmp_path / "bundle.tar", [upgrades.toy(tmp_path / "house")])
    board.upgrade(file.read_bytes())
    told = board.settle()
    new = board.blob.sha256
    assert (told.phase, told.current, told.name) == ("committed", new, upgrades.NEW)
    assert launcher.read_choice(board.versions) == VersionChoice(
        FLASHED,
        new,
        "",
        starts=1,
        online=True,
        began_s=launcher.read_choice(board.versions).began_s,
        boot="boot",  # type: ignore[union-attr]
    )
