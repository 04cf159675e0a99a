"""One run as an HTML page that works offline, from the coordinator's log.

The page shows only what the log contains. Accuracy on a test set is shown if `fedquilt model evaluate` has written
scores, and the partition if the data of the job is readable here.
"""

from __future__ import annotations

import time
from pathlib import Path

import fedquilt
from fedquilt.coordinator.storage.store import Store
from fedquilt.host import disk
from fedquilt.tools.report import rendering, run_data, sections
from fedquilt.tools.report.run_data import RunData, load_run_data


def write_run_page(store: Store, run: str, out: Path | None) -> Path:
    """Write the page of a run and return its path. Print the candidates of a stitching job."""
    data = load_run_data(store, run)
    file = out or Path(f"{data.row.id}.html")
    disk.write_output(file, render_run_page(data))
    for line in run_data.format_candidate_table(data.candidates, data.row.job):
        print(line)
    return file


def render_run_page(run: RunData, donors: rendering.PageSection | None = None) -> str:
    row = run.row
    return rendering.render_page(
        "run.html",
        row=row,
        began=time.strftime("%Y-%m-%d %H:%M", time.localtime(row.created)),
        version=fedquilt.__version__,
        tiles=sections.make_tiles(run),
        accuracy=sections.make_accuracy_section(run),
        confusion=sections.make_confusion_section(run),
        time=sections.make_time_section(run),
        timeline=sections.make_timeline_section(run),
        devices=sections.make_device_section(run),
        bytes=sections.make_bytes_section(run),
        donors=donors,
        front=run_data.make_candidate_section(run.candidates, row.job),
        matrix=sections.make_device_matrix(run.parts, run.summary.final_evaluation_round) if run.parts else None,
        reasons=sections.make_reason_table(run),
        partition=rendering.make_safe_markup(run.partition) if run.partition else None,
        log=sections.format_log(run),
        job=sections.format_job(row.job),
    )
