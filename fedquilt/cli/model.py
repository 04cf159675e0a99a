"""`fedquilt model`: export, evaluate, run, serve."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, option, verb_group
from fedquilt.console import progress


@verb_group()
def model() -> None:
    """Export, evaluate, run and serve the network that a run has made."""


@model.command()
@options.run_argument
@option("--out", type=options.PATH, required=True, help="The file to write.")
@option("--best", is_flag=True, help="Export the state with the best evaluation by devices.")
@option("--candidate", type=int, metavar="N", help="Write candidate N of a stitching job instead of the chosen one.")
@options.home_option
def export(run: str, out: Path, best: bool, candidate: int | None, home: Path) -> None:
    """Write a run's result: a stitched network as ONNX, or weights as safetensors."""
    from fedquilt.tools.artefacts import export as tool

    with home_access.open_existing_home(home) as store, progress.show_progress(f"exporting {run}"):
        progress.LINE.print_to_stdout(tool.export_result(store, run, out, best=best, candidate=candidate))


@model.command()
@options.run_argument
@option("--follow", is_flag=True, help="Evaluate the model of every round as it comes, until the run has ended.")
@options.home_option
@options.format_option
def evaluate(run: str, follow: bool, home: Path, format: str) -> None:
    """Evaluate a run's global model on the job's test set, with all metrics of the task."""
    from fedquilt.coordinator.views import scores
    from fedquilt.tools.experiments import evaluation as evaluator

    def print_score(score: scores.EvaluationScore) -> None:
        progress.LINE.print_to_stdout(*evaluator.format_score(score, matrix=not follow))

    report = print_score if follow and format == "text" else lambda score: None
    with home_access.open_existing_home(home) as store, progress.show_progress(f"evaluating {run}"):
        evaluation = evaluator.evaluate_run(store, run, follow=follow, report_score=report)
    if format == "text" and not follow:
        if not evaluation.scores:
            return print(f"{run} has no model to evaluate yet")
        print_score(evaluation.scores[-1])
    if format == "json":
        home_access.print_rows(format, evaluator.scores_to_dict(evaluation), [])


@model.command()
@argument("network", "The ONNX file that `model export` wrote.", type=options.PATH)
@argument("examples", "A folder, an image, recording, text or table, or an .npz.", type=options.PATH)
@options.format_option
def run(network: Path, examples: Path, format: str) -> int:
    """Classify examples with an exported ONNX network."""
    from fedquilt.tools.artefacts import classifier as tool

    return tool.print_predictions(network, examples, format)


@model.command()
@argument(
    "models",
    "A board's folder of models, whose `current` it follows; or a model's folder or ONNX file.",
    type=options.PATH,
)
@option("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="Address of the HTTP server, port 0: any.")
@option("--listen-anywhere", is_flag=True, help="Allow an address of --listen that other machines reach.")
def serve(models: Path, listen: str, listen_anywhere: bool) -> None:
    """Serve predictions of an exported network, with updates in place and drift detection."""
    from fedquilt.tools.operations import runner

    runner.serve_model(models, listen=listen, anywhere=listen_anywhere, print_line=lambda line: print(line, flush=True))
