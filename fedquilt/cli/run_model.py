"""`fedquilt run-model`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, verb


@verb()
@argument("model", "The ONNX file that `export` wrote.", type=options.PATH)
@argument("images", "A folder of images, or an .npz.", type=options.PATH)
@options.format
def run_model(model: Path, images: Path, format: str) -> int:
    """Classify a folder of images, or an .npz, with an exported ONNX network."""
    from fedquilt.tools.artefacts import run_model as tool

    return tool.main(model, images, format)
