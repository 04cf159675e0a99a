"""`fedquilt demo`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb, verbosity


@verb()
@option("--out", type=options.FOLDER, default=Path("fedquilt-demo"), help="Folder for what it makes.")
@option("--story", is_flag=True, help="Another story, of three minutes: a model that no longer fits, and what then.")
@option("--open", "show", is_flag=True, help="Open the report in a browser at the end.")
@options.format_option
def demo(out: Path, story: bool, show: bool, format: str) -> int:
    """Run a demo: simulated devices stitch a network for handwritten digits."""
    if story:
        from fedquilt.tools.lab.demo import story as tale

        return tale.run_story(out, format, show)
    from fedquilt.tools.lab import demo as tool

    return tool.run_demo(out, format, verbosity() > 0, show)
