"""`fedquilt evaluate`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb


@verb()
@options.run_argument
@option("--follow", is_flag=True, help="Evaluate the model of every round as it comes, until the run has ended.")
@option("--confusion", is_flag=True, help="Show the confusion matrix.")
@options.home_option
@options.format_option
def evaluate(run: str, follow: bool, confusion: bool, home: Path, format: str) -> None:
    """Evaluate a run's global model on the job's test set."""
    from fedquilt.console import progress
    from fedquilt.coordinator.views import scores
    from fedquilt.tools.experiments import evaluation as evaluator

    def print_score(score: scores.EvaluationScore) -> None:
        if format == "text":
            progress.LINE.print_to_stdout(*evaluator.format_score(score, confusion))

    with home_access.open_existing_home(home) as store, progress.show_progress(f"evaluating {run}"):
        found = evaluator.evaluate_run(store, run, follow=follow, say=print_score)
    if format == "json":
        home_access.print_rows(format, evaluator.scores_to_dict(found, confusion), [])
