"""`fedquilt run-model`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, verb


@verb()
@argument("model", "The ONNX file that `export` wrote.", type=options.PATH)
@argument("examples", "A folder, an image, recording, text or table, or an .npz.", type=options.PATH)
@options.format_option
def run_model(model: Path, examples: Path, format: str) -> int:
    """Classify examples with an exported ONNX network."""
    from fedquilt.tools.artefacts import run_model as tool

    return tool.main(model, examples, format)
