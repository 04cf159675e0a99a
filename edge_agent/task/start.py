"""Entry point of a sandboxed process of tasks or checks.

    python -m fedquilt.edge_agent.task.start PROGRAM PRIVATE PARENT

The process enters the sandbox before any library is imported, then becomes the module PROGRAM.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from fedquilt.edge_agent.task import sandbox

if __name__ == "__main__":
    sandbox.enter_sandbox(Path(sys.argv[2]))
    importlib.import_module(sys.argv[1]).main()
