"""What differs between the runs of one job name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedquilt.coordinator import settings
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import event_messages, job_changes

TABLE: dict[str, Any] = {
    "name": "job",
    "method": "fedavg",
    "params": {"lr": 0.05, "momentum": 0.9},
    "model": {"name": "mlp", "inputs": 2, "hidden": [32], "classes": 3},
    "test": {"path": "/data/test.csv"},
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"rounds": 20}, "rounds 20"),
        (
            {"params": {"lr": 0.01}, "model": {**TABLE["model"], "hidden": [64, 32]}},
            "lr 0.01, hidden [64, 32], no momentum",
        ),
        ({"test": {"path": "/data/other.csv"}}, "test.path other.csv"),
        ({"cohort": {"size": 5}}, "cohort.size 5"),
        ({"name": "another", "rounds": 20}, ""),
        (
            {"labels": [f"label {number}" for number in range(20)]},
            "labels ('label 0', 'label 1', 'label 2', 'label 3', 'labe...",
        ),
    ],
)
def test_a_run_shows_what_changed_since_the_last_of_its_name(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with Store(tmp_path / "runs") as store:
        _, second = (store.add_job(settings.parse_job(TABLE | each), tmp_path) for each in ({}, changes))
        found = job_changes.describe_changes(store.all_jobs())
        assert found == ({second: text} if text else {})
        rows = [event_messages.summarise_run(row, store, changes=found) for row in store.all_jobs()]
    head, *lines = event_messages.format_runs(rows, 200)
    assert head.endswith("changed") == bool(text)
    assert lines[1].endswith(text)
