"""`fedquilt model` run and serve, with the other verbs of the group."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb_group


@verb_group()
def model() -> None:
    """Export, evaluate, run and serve the network that a run has made."""


model.add_operator_verbs("results")


@model.command()
@argument("network", "The ONNX file that `model export` wrote.", type=options.PATH)
@argument("examples", "A folder, an image, recording, text or table, or an .npz.", type=options.PATH)
@option("--out", type=options.PATH, metavar="FILE", help="Write the predictions to a .csv or .json file.")
@option("--keep", variadic=True, metavar="COLUMN", help="Columns of the table to copy, such as an id.")
@options.format_option
def run(network: Path, examples: Path, out: Path | None, keep: tuple[str, ...], format: str) -> int:
    """Predict examples with an exported ONNX network."""
    from fedquilt.tools.artefacts import predictions as tool

    return tool.print_predictions(network, examples, format, out, keep)


@model.command()
@argument(
    "models",
    "A board's folder of models (follows `current`), a model's folder, or an ONNX file.",
    type=options.PATH,
)
@option("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="Address of the HTTP server, port 0: any.")
def serve(models: Path, listen: str) -> None:
    """Serve predictions of an exported network, with updates in place and drift detection."""
    from fedquilt.tools.operations.inference_server import serve_model

    serve_model(models, listen=listen, print_line=lambda line: print(line, flush=True))
