"""`fedquilt deploy`."""

from __future__ import annotations

from pathlib import Path

import click

from fedquilt.cli import home_access, options
from fedquilt.cli import rollout_options as phases
from fedquilt.cli.commands import argument, option, verb
from fedquilt.cli.rollout_options import RolloutOptions, submit_rollout

CHECKS = "What a board asks of a model in its own check, beside what it runs now"


@verb()
@argument(
    "run",
    "A run's id, or a job's name for its latest run; with --rollback, --abort a rollout (default: the latest model's).",
    required=False,
    shell_complete=options.complete_runs,
)
@option("--model", type=options.PATH, metavar="FILE.onnx", help="Deploy this file instead of a run's result.")
@option("--input-shape", type=options.POSITIVE, many=True, help="Shape of one example of --model: 3,224,224.")
@phases.rollout_options(
    option("--min-gain", type=phases.POINTS, metavar="POINTS", help="Least gain in accuracy: -0.5pt.", group=CHECKS),
    option("--max-latency", type=options.TIME, help="Most time of an answer: 40ms.", group=CHECKS),
    option("--max-energy", type=options.ABOVE_0, metavar="J", help="Most joules of an answer.", group=CHECKS),
    option("--max-peak", type=phases.SIZE, help="Most memory of the check: 500MB.", group=CHECKS),
)
@option("--rollback", is_flag=True, help="Take a rollout back that is done: boards return to what they ran before.")
@option("--abort", is_flag=True, help="End a rollout that is under way: boards that have it return.")
@options.home_option
def deploy(
    run: str | None,
    model: Path | None,
    input_shape: tuple[int, ...],
    phased: RolloutOptions,
    min_gain: float | None,
    max_latency: float | None,
    max_energy: float | None,
    max_peak: int | None,
    rollback: bool,
    abort: bool,
    home: Path,
) -> None:
    """Roll out a run's result, or an ONNX file, to the devices in phases."""
    from msgspec.structs import replace

    from fedquilt import wire
    from fedquilt.coordinator import control_requests
    from fedquilt.onnx import weights
    from fedquilt.tools.artefacts import export

    options.require_exclusive(rollback=rollback, abort=abort, model=model)
    with home_access.open_existing_home(home) as store:
        if rollback or abort:
            rollout = run or phases.find_latest_rollout(store, "model").id
            print((control_requests.roll_back_rollout if rollback else control_requests.abort_rollout)(store, rollout))
            return
        if (run is None) == (model is None):
            raise click.UsageError("name RUN or --model FILE.onnx: one of them", click.get_current_context())
        limits = wire.ReleaseLimits(
            min_gain=min_gain,
            max_latency_s=max_latency,
            max_energy_j=max_energy,
            max_peak_bytes=max_peak,
        )
        plan = phased.make_plan("model", "", limits=limits)
        if model is not None:
            payload, what, shape = b"".join(weights.read_with_external_data(model)), model.name, input_shape or None
            found = export.require_loadable(payload, what, shape)
            plan = replace(plan, name=model.stem[:200], input_shape=shape, versions=found.versions)
        else:
            payload, what = export.encode_for_devices(store, str(run))
            plan = replace(plan, name=store.find_job(str(run)).id)
        submit_rollout(store, plan, payload, what, home)
