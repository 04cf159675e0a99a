"""Start of a model's check in a process that is confined like a task's, and may write less.

    python -m fedquilt.edge_agent.releases.start MODELS PARENT

The process gives up what it can before any library is imported, then is `fedquilt.edge_agent.releases.check`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedquilt.edge_agent.task import confine


def command(models: Path) -> tuple[str, ...]:
    """The command of this process, which may write below the folder of models alone."""
    return (sys.executable, "-m", "fedquilt.edge_agent.releases.start", str(models))


if __name__ == "__main__":
    confine.confine(confine.folders(Path(sys.argv[1])))
    from fedquilt.edge_agent.releases import check

    check.main()
