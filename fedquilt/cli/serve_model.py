"""`fedquilt serve-model`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import options
from fedquilt.cli.commands import argument, option, verb


@verb()
@argument(
    "models",
    "A board's folder of models, whose `current` it follows; or a model's folder or ONNX file.",
    type=options.PATH,
)
@option("--http", metavar="HOST:PORT", help="Answer HTTP requests there. Default without the next two: 127.0.0.1:8080.")
@option("--folder", type=options.PATH, metavar="DIR", help="Answer to files that appear there, as lines of JSON.")
@option("--camera", metavar="DEVICE", help="Answer to pictures of a camera, such as /dev/video0, as lines of JSON.")
@option("--every", type=options.SECONDS, default=1.0, help="Seconds between two pictures of the camera.")
@option("--threads", type=options.COUNT, default=0, help="Threads of the network; 0: one per core.")
@option("--labels", type=options.PATH, metavar="FILE", help="Names of the classes, one a line, instead of the model's.")
@option("--listen-anywhere", is_flag=True, help="Allow an address of --http that other machines reach.")
def serve_model(
    models: Path,
    http: str | None,
    folder: Path | None,
    camera: str | None,
    every: float,
    threads: int,
    labels: Path | None,
    listen_anywhere: bool,
) -> None:
    """Serve predictions of an exported network, with updates in place and drift detection."""
    from fedquilt.tools.operations import runner

    options.require_exclusive(http=http, folder=folder, camera=camera)
    runner.main(
        models,
        listen=http or (None if folder or camera else "127.0.0.1:8080"),
        folder=folder,
        camera=camera,
        every_s=every,
        threads=threads,
        labels=labels,
        anywhere=listen_anywhere,
        say=lambda line: print(line, flush=True),
    )
