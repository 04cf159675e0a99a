"""The task's process, confined: `python -m fedquilt.edge_agent.task.start HOME PARENT`.

It gives up what it can before any library is imported, then is `fedquilt.edge_agent.task.main`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedquilt.edge_agent.task import confine

if __name__ == "__main__":
    confine.confine(confine.folders(Path(sys.argv[1])))
    from fedquilt.edge_agent.task import main

    main.main()
