"""`fedquilt evaluate`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import option, verb


@verb()
@options.run_argument
@option("--follow", is_flag=True, help="Evaluate the model of every round as it comes, until the run has ended.")
@option("--confusion", is_flag=True, help="Show the confusion matrix.")
@options.home
@options.format
def evaluate(run: str, follow: bool, confusion: bool, home: Path, format: str) -> None:
    """Evaluate a run's global model on the job's test set, which no device has."""
    from fedquilt import progress
    from fedquilt.coordinator.views import scores
    from fedquilt.tools.experiments import evaluate as evaluator

    def say(score: scores.Score) -> None:
        if format == "text":
            progress.LINE.aside(*evaluator.lines(score, confusion))

    with homes.existing(home) as store, progress.during(f"evaluating {run}"):
        found = evaluator.evaluate(store, run, follow=follow, say=say)
    if format == "json":
        homes.show(format, evaluator.told(found, confusion), [])
