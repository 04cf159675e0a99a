"""Reports of runs for the dashboard, built by separate processes to free their memory.

`python -m fedquilt.tools.operations.dash.reports HOME RUN` prints a report. The home is only read.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

from fedquilt.core import FedquiltError, JobError, shorten_error

TIMEOUT_S: Final = 120.0
MAX_BYTES: Final = 30_000_000
MAX_CACHED_PAGES: Final = 4  # pages
NICENESS: Final = 10  # the coordinator may be on the same machine


class ReportBuilder:
    def __init__(self, home: Path) -> None:
        self._home, self._lock = home, asyncio.Lock()
        self._pages: dict[tuple[str, str], bytes] = {}

    async def get_page(self, run: str, state: str) -> bytes:
        """Return a run's report as HTML, built again for a new `state`, or raise JobError if that fails."""
        async with self._lock:
            if (run, state) not in self._pages:
                page = await self._make_page(run)
                while len(self._pages) >= MAX_CACHED_PAGES:
                    del self._pages[next(iter(self._pages))]
                self._pages[run, state] = page
            return self._pages[run, state]

    async def _make_page(self, run: str) -> bytes:
        command = (sys.executable, "-m", "fedquilt.tools.operations.dash.reports", str(self._home), run)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, limit=MAX_BYTES)
        try:
            page, error_output = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        except asyncio.TimeoutError:
            raise JobError(f"report of {run} took more than {TIMEOUT_S:.0f} s: use `fedquilt report {run}`") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = error_output.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
            raise JobError(f"report of {run} failed: {shorten_error(lines[-1])}")
        return page


def main(home: str, run: str) -> int:
    """Write a run's page to standard output, at low priority. Return 0, or 1 if it cannot be made."""
    from fedquilt import extras
    from fedquilt.coordinator.storage.store import StoreReader
    from fedquilt.tools import report
    from fedquilt.tools.report.run_data import load_run_data

    os.nice(NICENESS)
    try:
        with StoreReader(Path(home)) as store, extras.report_missing_extras():
            page = report.render_run_page(load_run_data(store, run))
    except FedquiltError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(page.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
