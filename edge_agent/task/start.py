"""Entry point of a sandboxed task process.

    python -m fedquilt.edge_agent.task.start PRIVATE PARENT

The process enters the sandbox before any library is imported, then becomes `fedquilt.edge_agent.task.main`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedquilt.edge_agent.task import sandbox

if __name__ == "__main__":
    sandbox.enter_sandbox(Path(sys.argv[1]))
    from fedquilt.edge_agent.task import main

    main.main()
