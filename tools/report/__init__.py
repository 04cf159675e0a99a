"""`fedquilt report`: one run as one HTML page that works offline, from the coordinator's log alone.

The page shows only what the log holds: a board without a meter has no joules. Accuracy on a common test set is
shown if `fedquilt evaluate` has written it; the partition's picture if the job's data is at hand.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fedquilt
from fedquilt import disk
from fedquilt.coordinator.store import Store
from fedquilt.tools.report import front, matrix, page, sections
from fedquilt.tools.report.found import Found, gather


def main(store: Store, run: str, out: Path | None) -> Path:
    """Write a run's page and return its path; print what a stitching job's candidates cost and how accurate they are.

    Raises:
        StoreError: there is no such run, or the file cannot be written.
    """
    found = gather(store, run)
    file = out or Path(f"{found.row.id}.html")
    disk.write(file, html(found))
    for line in front.lines(found.candidates, found.row.job):
        print(line)
    return file


def html(found: Found, template: str = "run.html", **more: Any) -> str:
    """The page; `more` is what another template wants besides."""
    row = found.row
    return page.render(
        template,
        row=row,
        began=time.strftime("%Y-%m-%d %H:%M", time.localtime(row.created)),
        version=fedquilt.__version__,
        tiles=sections.tiles(found),
        accuracy=sections.accuracy(found),
        time=sections.time(found),
        devices=sections.devices(found),
        bytes=sections.bytes(found),
        front=front.section(found.candidates, row.job),
        matrix=matrix.matrix(found.parts) if found.parts else None,
        reasons=sections.reasons(found),
        partition=page.markup(found.partition) if found.partition else None,
        log=sections.log(found),
        job=sections.toml(row.job),
        **more,
    )
