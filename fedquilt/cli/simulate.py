"""`fedquilt simulate`."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedquilt.cli import home_access, job_files, options
from fedquilt.cli.commands import argument, option, verb, verbosity
from fedquilt.core import JobError


@verb()
@argument(
    "source",
    "A job file, or data: a CSV, Parquet or .npz file, a folder of images by class or of IDX files, sklearn/NAME, "
    "torchvision/NAME, or digits, which come with fedquilt.",
)
@option(
    "--label",
    default="",
    show_default=False,
    metavar="COLUMN",
    help="Column or array to predict, with data (default: y).",
)
@option("--out", type=options.NEW_JOB, help="The job file to write, with data (default: job.toml).")
@option("--force", is_flag=True, help="Overwrite the job file.")
@option("--devices", type=options.POSITIVE, help="Number of devices (default: the job's fleet.devices).")
@option(
    "--link",
    default="memory",
    type=options.WordChoice(("memory", "embedded", "broker")),
    help="memory: all in this process on virtual time; embedded: agents as processes, a broker of our own; broker: the "
    "same over --broker. With --engine there is no link: rounds on virtual time, work done by workers.",
)
@options.home_option
@options.worker_options
@options.broker_options()
def simulate(
    source: str,
    label: str,
    out: Path | None,
    force: bool,
    devices: int | None,
    link: str,
    home: Path,
    workers: options.WorkerOptions,
    broker: options.BrokerOptions,
) -> int:
    """Run a job on simulated devices that use the agents' own code, from a job file or from data.

    With data, `simulate` inspects them, writes a job with a network that fits, runs it and writes a report. Data stay
    on this machine.
    """
    is_job = source.endswith(".toml")
    job = Path(source) if is_job else out or Path("job.toml")
    if is_job:
        if label or force or out:
            raise JobError(f"--label, --out and --force go with data: {source} is a job file, which is run as it is")
    else:
        from fedquilt.tools.lab import new_job

        found = new_job.inspect_source(source, label)
        count = devices or new_job.choose_devices(found)
        job_files.write_job(new_job.NewJob(job, found, "fedavg", count, new_job.ROUNDS), force=force)
    run, status = _run_job(job, devices, link, home, workers, broker)
    chosen = [*(["--devices", str(devices)] if devices else []), *(["--link", link] if link != "memory" else [])]
    again = shlex.join(["fedquilt", "simulate", str(job), *chosen, *broker.arguments, *workers.arguments])
    if status == "done" and not is_job:
        _write_report(home, run, job.with_suffix(".html"))
    return home_access.report_end(home, run, status, again)


def _run_job(
    job: Path,
    devices: int | None,
    link: str,
    home: Path,
    workers: options.WorkerOptions,
    broker: options.BrokerOptions,
) -> tuple[str, str]:
    from fedquilt.formats import toml
    from fedquilt.tools.simulation import agents as tool

    read = home_access.load_job(job)
    folder = home_access.bundle_folder(job)
    plan = tool.FleetPlan(job=read, bundle=folder, home=home, devices=devices, fleet=broker.fleet)
    with toml.prefix_errors(str(job)):
        plan.validate_fleet()
    job_files.prepare_if_changed(job, read)
    wordy = verbosity() > 0
    try:
        if workers.is_given:
            if link != "memory":
                raise JobError(f"--link {link} and --engine are two ways to reach the boards: leave one of them out")
            from fedquilt.tools.experiments import single_run

            return single_run.run_and_print(plan, wordy=wordy, **workers.to_keywords())
        if link == "memory":
            return tool.run_fleet_virtually(plan, wordy=wordy)
    except KeyboardInterrupt:
        return "", "running"
    return tool.run_fleet_on_broker(plan, broker.to_table() if link == "broker" else None, wordy=wordy)


def _write_report(home: Path, run: str, file: Path) -> None:
    from fedquilt import extras

    with home_access.open_existing_home(home) as store:
        try:
            from fedquilt.tools import report

            print(f"{report.write_run_page(store, run, file)}: the report")
        except ModuleNotFoundError as error:
            print(f"no report: {extras.missing_message(error.name or '')}")
