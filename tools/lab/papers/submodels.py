"""Code of submodels.toml: accuracy of the sub-models that devices with less memory train."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from fedquilt.edge_agent.settings import parse_size
from fedquilt.tools.experiments.evaluation import Evaluator
from fedquilt.tools.lab.papers.cells import ExecutionOptions
from fedquilt.tools.simulation.simulated_job import Simulation
from fedquilt.tools.simulation.workers.backend import WorkBackend

PARTS: Final = ("1GB", "2GB", "4GB")
WHOLE: Final = ("fedavg", "fedepth")  # methods that send the whole network to every device


def observe_run(folder: Path, how: ExecutionOptions, simulation: Simulation, hands: WorkBackend) -> dict[str, Any]:
    """Return after the last round the accuracy of the sub-model for each memory budget."""
    if not simulation.is_finished or simulation.job.method in WHOLE:
        return {}
    with Evaluator(simulation.job, folder) as judge:
        scores = {
            part: judge.score(simulation.state, simulation.completed_rounds, budget_bytes=parse_size(part))
            for part in PARTS
        }
    return {part: score.value for part, score in scores.items() if score is not None}
