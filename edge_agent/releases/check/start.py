"""Entry point of a sandboxed model check.

    python -m fedquilt.edge_agent.releases.check.start PRIVATE PARENT

The process enters the sandbox before any library is imported, then becomes `fedquilt.edge_agent.releases.check.main`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedquilt.edge_agent.task import sandbox


def check_command(private: Path) -> tuple[str, ...]:
    """Return the command of a check's process, which may write only its folders below `private`."""
    return (sys.executable, "-m", "fedquilt.edge_agent.releases.check.start", str(private))


if __name__ == "__main__":
    sandbox.enter_sandbox(Path(sys.argv[1]))
    from fedquilt.edge_agent.releases.check import main

    main.main()
