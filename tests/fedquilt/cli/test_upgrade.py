"""`fedquilt rollout agent` and `rollout settings` as typed: what is queued, and what is refused before that."""

from pathlib import Path

import pytest
import upgrades

from fedquilt import cli
from fedquilt.coordinator.rounds.rollout import RolloutPlan
from fedquilt.coordinator.storage.store import Store


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with nothing in it."""
    Store(tmp_path / "runs").close()
    return tmp_path / "runs"


def queued(home: Path) -> RolloutPlan:
    """The latest rollout's plan."""
    with Store(home) as store:
        return store.rollouts.find_rollout().state.plan


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence with which a command line is refused."""
    try:
        code = cli.main([*words])
    except SystemExit as end:
        code = int(str(end.code))
    assert code != 0
    return capsys.readouterr().err


def test_an_upgrade_is_queued_with_its_version_and_phases(home, tmp_path, capsys):
    file = upgrades.pack(tmp_path / "agents.tar", [upgrades.toy(tmp_path / "house")])
    words = ("--phases", "10%", "50,100", "--label", "site=lab", "--soak", "5min", "--window", "02:00-05:00")
    assert cli.main(["rollout", "agent", str(file), "--home", str(home), *words]) == 0
    plan = queued(home)
    assert (plan.kind, plan.name, plan.select, plan.cumulative_shares) == (
        "agent",
        "9.9.9",
        ("site=lab",),
        (0.1, 0.5, 1.0),
    )
    assert (plan.soak_s, plan.window, plan.force) == (300.0, "02:00-05:00", False)
    with Store(home) as store:
        kept = store.depot.blob_path(plan.blob.sha256)
        assert kept.read_bytes() == file.read_bytes()
    assert "not signed: only boards whose agent.toml says unsigned = true" in capsys.readouterr().out
    assert "is queued: wait for its end" in refused(capsys, "rollout", "agent", str(file), "--home", str(home))
    assert cli.main(["rollout", "back", "agent", "--home", str(home)]) == 0
    assert "is ended" in capsys.readouterr().out


def test_what_is_no_bundle_is_not_sent(home, tmp_path, capsys):
    """A bundle that no board would take, such as one with a changed wheel, is refused."""
    (tmp_path / "x").write_bytes(b"x" * 1000)
    assert "is no bundle of an upgrade" in refused(capsys, "rollout", "agent", str(tmp_path / "x"), "--home", str(home))
    house = [upgrades.toy(tmp_path / "house")]
    file = upgrades.pack(tmp_path / "agents.tar", house, wheels={house[0].name: "0" * 64})
    assert "is not the one that its manifest names" in refused(
        capsys, "rollout", "agent", str(file), "--home", str(home)
    )
    assert "there is nothing to take back" in refused(capsys, "rollout", "back", "agent", "--home", str(home))
    with Store(home) as store:
        assert store.rollouts.readable_rollouts() == []


def test_settings_are_queued_as_boards_take_them(home, capsys):
    words = ("budget=1GB", "labels=+canary,-old", "policy=energy", "max_w=10", "telemetry_s=60")
    assert cli.main(["rollout", "settings", *words, "--label", "site=lab", "--home", str(home)]) == 0
    plan = queued(home)
    assert (plan.kind, plan.select, plan.blob) == ("settings", ("site=lab",), None)
    assert plan.settings == {
        "budget": "1GB",
        "labels": ["+canary", "-old"],
        "policy": "energy",
        "max_w": 10.0,
        "telemetry_s": 60.0,
    }
    assert cli.main(["rollout", "back", "settings", "--home", str(home)]) == 0
    assert "is ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["budget"], "'budget' is no setting: write budget=1GB"),
        (["budget=1GB", "budget=2GB"], "budget is set twice"),
        (["budget=much"], "budget: 'much' is no size"),
        (["max_w=ten"], "max_w is a number"),
        (["home=/"], "home"),
        (["labels=+a,b"], "labels have all a sign"),
        ([], "missing argument"),
    ],
)
def test_settings_that_no_board_would_take_are_not_sent(home, capsys, words, said):
    assert said in refused(capsys, "rollout", "settings", *words, "--home", str(home))
