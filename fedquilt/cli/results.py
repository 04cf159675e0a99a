"""`fedquilt model` export and evaluate, left out of the wheel for boards."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb
from fedquilt.console import progress, table
from fedquilt.core import JobError


@verb()
@options.run_argument
@option("--out", type=options.PATH, required=True, help="The file to write.")
@option("--best", is_flag=True, help="Export the state with the best evaluation by devices.")
@option("--candidate", type=int, metavar="N", help="Write candidate N of a stitching job instead of the chosen one.")
@options.home_option
def export(run: str, out: Path, best: bool, candidate: int | None, home: Path) -> None:
    """Write a run's result: a stitched network as ONNX, or weights as safetensors."""
    from fedquilt.tools.artefacts import export as tool
    from fedquilt.tools.artefacts import graph_interface

    with home_access.open_existing_home(home) as store, progress.show_progress(f"exporting {run}"):
        lines = [tool.export_result(store, run, out, best=best, candidate=candidate)]
        lines += graph_interface.describe_interface(out) if out.suffix == ".onnx" and out.is_file() else []
        progress.LINE.print_to_stdout(*(part for line in lines for part in table.fold_line(line)))


@verb()
@options.run_argument
@option("--data", type=options.PATH, metavar="FILE", help="Examples to evaluate on (default: the job's test set).")
@option("--best", is_flag=True, help="Evaluate the state with the best evaluation by devices.")
@option("--follow", is_flag=True, help="Evaluate the model of every round as it comes, until the run has ended.")
@options.home_option
@options.format_option
def evaluate(run: str, data: Path | None, best: bool, follow: bool, home: Path, format: str) -> None:
    """Evaluate a run's global model on a test set, with all metrics of the task."""
    from fedquilt.coordinator.views import scores
    from fedquilt.tools.experiments import evaluation as evaluator

    def print_score(score: scores.EvaluationScore) -> None:
        progress.LINE.print_to_stdout(*evaluator.format_score(score, None if follow else job))

    if follow and (best or data is not None):
        raise JobError("--follow evaluates each round on the job's test set: leave --best and --data out")
    with home_access.open_existing_home(home) as store, progress.show_progress(f"evaluating {run}"):
        job = store.find_job(run).job
        if best or data is not None:
            evaluation = evaluator.evaluate_state(store, run, best=best, data=data)
        else:
            report = print_score if follow and format == "text" else lambda score: None
            evaluation = evaluator.evaluate_run(store, run, follow=follow, report_score=report)
    evaluation = evaluator.convert_to_units(evaluation, job)
    if format == "text" and not follow:
        if not evaluation.scores:
            return print(f"{run} has no model to evaluate yet")
        print_score(evaluation.scores[-1])
    if format == "json":
        home_access.print_rows(format, evaluator.scores_to_dict(evaluation), [])
