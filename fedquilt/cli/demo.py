"""`fedquilt demo`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import option, verb, wordy


@verb()
@option("--out", type=options.FOLDER, default=Path("fedquilt-demo"), help="Folder for what it makes.")
@option("--story", is_flag=True, help="Another story, of three minutes: a model that no longer fits, and what then.")
@option("--open", "show", is_flag=True, help="Open the report in a browser at the end.")
@options.format
def demo(out: Path, story: bool, show: bool, format: str) -> int:
    """See a federation of simulated boards stitch a network for real handwritten digits; -v prints every round."""
    if story:
        from fedquilt.tools.demo import story as tale

        return tale.story(out, format, show)
    from fedquilt.tools import demo as tool

    return tool.demo(out, format, wordy() > 0, show)
