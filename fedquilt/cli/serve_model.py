"""`fedquilt serve-model`."""

from __future__ import annotations

import functools
from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument(
    "models",
    "A board's folder of models, whose `current` it follows; or a model's folder or ONNX file.",
    type=options.PATH,
)
@option(
    "--http",
    metavar="HOST:PORT",
    default="127.0.0.1:8080",
    help="Address of the HTTP server, with port 0 for a free one.",
)
@option("--threads", type=options.COUNT, default=0, help="Threads of the network; 0: one per core.")
@option("--labels", type=options.PATH, metavar="FILE", help="Names of the classes, one a line, instead of the model's.")
@option("--listen-anywhere", is_flag=True, help="Allow an address of --http that other machines reach.")
def serve_model(models: Path, http: str, threads: int, labels: Path | None, listen_anywhere: bool) -> None:
    """Serve predictions of an exported network, with updates in place and drift detection."""
    from fedquilt.tools.operations import runner

    say = functools.partial(print, flush=True)
    runner.main(models, http, threads=threads, labels=labels, anywhere=listen_anywhere, say=say)
