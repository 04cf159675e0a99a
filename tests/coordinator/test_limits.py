"""limits.toml: limits that are common to a coordinator's jobs."""

import pytest
from stored_job import JOB

from fedquilt.coordinator import run_control, settings
from fedquilt.coordinator.jobs import retention
from fedquilt.coordinator.settings import CoordinatorLimits, RetentionSettings, SubmitterLimits
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError


def test_without_a_file_the_defaults_hold(tmp_path):
    assert settings.load_limits(tmp_path) == CoordinatorLimits()
    assert RetentionSettings().older_than_s is None


def test_what_the_file_says_holds(tmp_path):
    text = 'running = 3\n[submitter]\nrunning = 2\nshare = 0.5\n[retention]\nkeep = 10\nolder_than = "2d"\n'
    (tmp_path / settings.FILE).write_text(text)
    found = settings.load_limits(tmp_path)
    assert found == CoordinatorLimits(3, SubmitterLimits(2, 0.5), RetentionSettings(10, "2d"))
    assert found.retention.older_than_s == 2 * 86400.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("running = 0", "running"),
        ("places = 2", "places"),
        ("[submitter]\nshare = 1.5", "share"),
        ('[retention]\nolder_than = "soon"', "'soon' is no time"),
        ("running =", "is not TOML"),
        ('[sites.plant]\nboards = ["cam-*"]', "most"),
        ('[sites.plant]\nboards = ["*-cam"]\nmost = 1', "boards"),
        (
            '[sites.plant]\nboards = ["cam-*"]\nmost = 1\n[sites.gate]\nboards = ["cam-1"]\nmost = 1',
            "plant and gate may both speak for one board",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path, text, said):
    (tmp_path / settings.FILE).write_text(text)
    with pytest.raises(JobError, match=said) as raised:
        settings.load_limits(tmp_path)
    assert settings.FILE in str(raised.value)


def test_a_run_that_is_resumed_while_retention_looks_is_kept(tmp_path, monkeypatch):
    with Store(tmp_path) as store, Store(tmp_path) as other:
        ids = [store.add_job(JOB, tmp_path / "bundle") for _ in range(2)]
        for id in ids:
            store.set_status(id, "stopped")

        def old(*args):
            run_control.resume_run(other, ids[0])
            return ids

        monkeypatch.setattr(retention, "select_expired_runs", old)
        assert retention.remove_expired_runs(store, RetentionSettings(keep=0), 0.0) == [ids[1]]
        assert [row.id for row in store.readable_jobs()] == [ids[0]]
