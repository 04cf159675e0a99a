"""The process of a model's check, confined as a task's.

    python -m fedquilt.edge_agent.releases.start HOME MODELS PARENT

It gives up what it can before any library is imported, then is `fedquilt.edge_agent.releases.check`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedquilt.edge_agent.task import confine


def command(home: Path, models: Path) -> tuple[str, ...]:
    """The command of this process, which may write below the agent's home and the folder of models alone."""
    return (sys.executable, "-m", "fedquilt.edge_agent.releases.start", str(home), str(models))


if __name__ == "__main__":
    confine.confine([*confine.folders(Path(sys.argv[1])), Path(sys.argv[2])])
    from fedquilt.edge_agent.releases import check

    check.main()
