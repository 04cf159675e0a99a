"""Commands that prepare and run jobs, with the broker and the methods that they use."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, option, verb, verb_group, verbosity
from fedquilt.console import progress, table, units
from fedquilt.core import JobError

if TYPE_CHECKING:
    from fedquilt.coordinator.settings import JobSettings
    from fedquilt.coordinator.storage.store import Store
    from fedquilt.security.handshake import LinkIdentity
    from fedquilt.tools.lab.new_job import NewJob
    from fedquilt.transport.exclusive_link import ExclusiveLink


@verb()
@options.job_argument
def prepare(job: Path) -> None:
    """Create JOB.bundle beside a job file: donors split into blocks, or a network's initial weights.

    Commands that use the bundle do this where the job, or a file that it names, has changed.
    """
    prepare_bundle(job, home_access.load_job(job))


@verb()
@options.job_argument
@options.home_option
@options.blob_options
@options.broker_options()
def run(job: Path, home: Path, blobs: options.BlobOptions, broker: options.BrokerOptions) -> int:
    """Run a job to its end, here or on the serving coordinator, or arm its [trigger]."""
    from fedquilt.coordinator import settings
    from fedquilt.coordinator.storage.store import ARMED, Store
    from fedquilt.formats import job_bundle as bundles

    job_settings = home_access.load_job(job)
    settings.require_no_simulated_faults(job_settings)
    folder = prepare_if_changed(job, job_settings)
    bundle = bundles.load_bundle(folder)
    with Store(home) as store:
        id = store.find_unfinished(job_settings, folder.resolve())
        if id is not None and store.stored_status(id) == ARMED:
            print(f"{id} is already armed (`fedquilt stop {id}` disarms it)")
            return 0
        if id is None or job_settings.trigger is not None:
            settings.require_matching_bundle(job_settings, bundle)
            settings.create_initial_state(job_settings, bundle)
        if job_settings.trigger is not None:
            id = store.add_job(job_settings, folder.resolve())
            print(f"{id} is armed: `fedquilt serve --home {home}` starts its runs; `fedquilt stop {id}` disarms it")
            return 0

        print_privacy_note(job_settings)

        def submit() -> str:
            id, exists = store.find_or_add_job(job_settings, folder.resolve())
            if exists:
                print(f"continuing {id}, which is unfinished (delete it with `fedquilt prune {id}` for a new run)")
                store.set_status(id, "running")
            return id

        return run_to_end(home, broker, blobs, store, submit)


@verb()
@options.source_argument
@options.label_column_option
@option("--out", type=options.NEW_JOB, help="The job file to write, with data (default: job.toml).")
@option("--force", is_flag=True, help="Overwrite the job file.")
@option("--devices", type=options.POSITIVE, help="Number of devices (default: the job's fleet.devices).")
@option(
    "--link",
    default="memory",
    type=options.WordChoice(("memory", "embedded", "broker")),
    help="memory: one process on virtual time; embedded: agents as processes with an own broker; broker: agents as "
    "processes over --broker. --engine requires memory.",
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

    With data, `simulate` inspects them and writes a job with a network that fits. Data stay on this machine. Each run
    gets a report, RUN.html. An interrupted run of an unchanged job continues.
    """
    is_job = source.endswith(".toml")
    job = Path(source) if is_job else out or Path("job.toml")
    if is_job:
        if label or force or out:
            raise JobError(f"--label, --out and --force require data, but {source} is a job file: leave them out")
    else:
        from fedquilt.tools.lab import new_job

        with progress.show_progress(f"inspecting {source}"):
            planned_job = new_job.plan_simulation(job, source, label, devices)
        write_job(planned_job, force=force)
    run, status = _run_job(job, devices, link, home, workers, broker)
    arguments = [*(["--devices", str(devices)] if devices else []), *(["--link", link] if link != "memory" else [])]
    resume_command = shlex.join(["fedquilt", "simulate", str(job), *arguments, *broker.arguments, *workers.arguments])
    if status == "done" and run:
        _print_results(home, run)
        _write_report(home, run, job.with_name(f"{run}.html"))
    return report_end(home, run, status, resume_command)


def print_privacy_note(job_settings: JobSettings) -> None:
    from fedquilt.coordinator import privacy_settings

    if note := privacy_settings.describe_unprotected_numbers(job_settings):
        print("\n".join(table.fold_line(note)))


def _run_job(
    job: Path, devices: int | None, link: str, home: Path, workers: options.WorkerOptions, broker: options.BrokerOptions
) -> tuple[str, str]:
    from fedquilt.formats import toml
    from fedquilt.tools.simulation import agents as tool

    job_settings = home_access.load_job(job)
    folder = home_access.bundle_folder(job)
    plan = tool.FleetPlan(job=job_settings, bundle=folder, home=home, devices=devices, fleet=broker.fleet)
    with toml.prefix_errors(str(job)):
        plan.validate_fleet()
    prepare_if_changed(job, job_settings)
    print_privacy_note(job_settings)
    verbose = verbosity() > 0
    try:
        if workers.is_given:
            if link != "memory":
                raise JobError(f"--link {link} is not possible with --engine, --workers or --mixed: leave one out")
            from fedquilt.tools.experiments import single_run

            return single_run.run_and_print(plan, verbose=verbose, **workers.to_keywords())
        if link == "memory":
            return tool.run_fleet_virtually(plan, verbose=verbose)
    except KeyboardInterrupt:
        return "", "running"
    return tool.run_fleet_on_broker(plan, broker.to_table() if link == "broker" else None, verbose=verbose)


def _print_results(home: Path, run: str) -> None:
    from fedquilt.coordinator.views import event_messages, run_summary
    from fedquilt.tools.experiments import evaluation

    with home_access.open_existing_home(home) as store:
        summary = run_summary.summarise_events(store.find_job(run).job, store.read_events(run))
        export = f"fedquilt model export {run}{options.home_argument(home)} --best --out FILE"
        lines = [*evaluation.describe_test_result(store, run), *event_messages.describe_best_round(summary, export)]
    home_access.print_rows("text", [], lines)


def _write_report(home: Path, run: str, file: Path) -> None:
    from fedquilt import extras

    with home_access.open_existing_home(home) as store:
        try:
            from fedquilt.tools import report

            print(f"{report.write_run_page(store, run, file)}: the report")
        except ModuleNotFoundError as error:
            print(f"no report: {extras.missing_message(error.name or '')}")


@verb()
@options.home_option
@option("--metrics", metavar="HOST:PORT", help="Serve metrics in the OpenMetrics format at http://HOST:PORT/metrics.")
@options.blob_options
@option(
    "--site",
    type=options.PATH,
    metavar="FILE",
    help="Also be a device of another coordinator, by this agent.toml (device, home, fleet, [broker]).",
)
@options.format_option
@options.broker_options()
def serve(
    home: Path,
    metrics: str | None,
    blobs: options.BlobOptions,
    site: Path | None,
    format: str,
    broker: options.BrokerOptions,
) -> None:
    """Run the coordinator for the jobs in --home until stopped."""
    from fedquilt import extras
    from fedquilt.coordinator import settings
    from fedquilt.coordinator.storage.store import Store
    from fedquilt.coordinator.views.terminal import Console, JsonConsole, run_coordinator
    from fedquilt.host import logs

    locations = blobs.to_locations(broker.ca)
    if metrics is not None:
        extras.load_optional("prometheus_client")  # before the store is made and jobs are announced
    with Store(home) as store:
        home = home.resolve()
        if not store.acquire_lock():
            raise JobError(f"another coordinator serves {home} already: stop it, or give another --home and --fleet")
        limits = settings.load_limits(home)
        console = Console(verbose=verbosity() > 0, run_names=True)
        if format == "json":
            logs.use_json_logs()
            console = JsonConsole()
        link, identity = open_coordinator_link(home, broker, console.report)
        console.report(
            f"serving {home} on {broker.url}; submit with `fedquilt run JOB --home {home}`, "
            f"watch with `fedquilt logs RUN --follow --home {home}`"
        )
        site_agent = None
        if site is not None:
            from fedquilt.tools.operations.site import connect_site_agent

            site_agent = connect_site_agent(site, store)
            console.report(
                f"site {site_agent.agent.device} of the coordinator at {site_agent.agent.settings.broker.url}"
            )
        run_coordinator(
            store,
            link,
            broker.fleet,
            console,
            identity=identity,
            metrics=metrics,
            limits=limits,
            location_settings=locations,
            site=site_agent,
        )


@verb()
@options.run_argument
@options.home_option
def stop(run: str, home: Path) -> None:
    """Stop a run, which `resume` can continue."""
    from fedquilt.coordinator import run_control

    with home_access.open_existing_home(home) as store:
        print(run_control.stop_run(store, run))


@verb()
@options.run_argument
@options.home_option
@options.blob_options
@options.broker_options()
def resume(run: str, home: Path, blobs: options.BlobOptions, broker: options.BrokerOptions) -> int:
    """Resume a stopped, failed or interrupted run, or approve one that a [trigger] started."""
    from fedquilt.coordinator import run_control
    from fedquilt.coordinator.storage.store import UNAPPROVED

    with home_access.open_existing_home(home) as store:
        if store.find_job(run).status == UNAPPROVED:
            print(run_control.approve_run(store, run))
            return 0
        run_control.require_resumable(store, run)
        return run_to_end(home, broker, blobs, store, lambda: run_control.resume_run(store, run).id)


@verb()
@options.job_argument
@option(
    "--methods",
    variadic=True,
    metavar="METHOD",
    help="Methods to compare (default: the job's own and those of its [compare] tables).",
    shell_complete=options.complete_methods,
)
@option(
    "--seeds", type=options.INTEGER, variadic=True, default=(0, 1, 2), help="Seeds; every method is run once with each."
)
@option("--rounds", type=options.POSITIVE, help="Number of rounds of every run (default: the job's).")
@option(
    "--target", type=options.POSITIVE_NUMBER, metavar="A", help="Count costs up to this accuracy, 0 to 1, or this RMSE."
)
@option(
    "--set",
    "changes",
    variadic=True,
    commas=False,
    metavar="METHOD.PARAM=VALUE",
    help="Parameters of methods; they override those in [compare.METHOD].",
)
@option(
    "--out", type=options.FOLDER, default=Path("fedquilt-compare"), help="Folder for finished runs, plots and the page."
)
@options.format_option
@options.worker_options
def compare(
    job: Path,
    methods: tuple[str, ...],
    seeds: tuple[int, ...],
    rounds: int | None,
    target: float | None,
    changes: tuple[str, ...],
    out: Path,
    format: str,
    workers: options.WorkerOptions,
) -> int:
    """Compare methods with several seeds on the same simulated fleet."""
    from fedquilt.tools.experiments import comparison as tool

    settings = home_access.load_job(job)
    return tool.compare_and_print(
        settings,
        prepare_if_changed(job, settings, progress.LINE.print_lines),
        out,
        names=methods,
        seeds=list(seeds),
        rounds=rounds,
        target=target,
        changes=tool.parse_changes(list(changes)),
        format=format,
        **workers.to_keywords(),
    )


@verb()
@argument("method", "The method to show.", required=False, shell_complete=options.complete_methods)
@option("--out", type=options.FOLDER, metavar="FOLDER", help="Folder to write a page for each method into.")
@options.format_option
def methods(method: str | None, out: Path | None, format: str) -> None:
    """List the methods, or show a method's paper, deviations and parameters."""
    from fedquilt.tools.experiments import method_pages as tool
    from fedquilt.tools.lab import papers

    tool.write_or_print_pages(method, out, format, papers.find_tables_of_method)


@verb_group(invoke_without_command=True)
@option("--listen", default="127.0.0.1:1883", metavar="HOST:PORT", help="Address to listen on.")
@option(
    "--password-file",
    type=options.PATH,
    help="File with users and passwords; optional for loopback addresses.",
)
@click.pass_context
def broker(context: click.Context, listen: str, password_file: Path | None) -> None:
    """Run the embedded MQTT broker (3.1.1, without TLS), for one machine and tests."""
    if context.invoked_subcommand is None:
        from fedquilt import metrics_endpoint
        from fedquilt.tools import broker as tool

        tool.serve_foreground(*metrics_endpoint.parse_listen_address(listen), password_file)


@broker.command()
@option(
    "--host",
    "hosts",
    multiple=True,
    required=True,
    help="Name or address by which clients reach the broker; may be repeated.",
)
@option("--out", type=options.FOLDER, required=True, help="Folder for the broker's files.")
@option(
    "--installed",
    default="/etc/mosquitto/fedquilt",
    metavar="DIR",
    help="Path of the folder on the broker's machine.",
)
@option("--listen", default="0.0.0.0:8883", metavar="HOST:PORT", help="Address of the broker's TLS listener.")
@option("--fleet", type=options.NAME, default="fleet", help="Name of the fleet in MQTT topics.")
@options.authority_option
def config(hosts: tuple[str, ...], out: Path, installed: str, listen: str, fleet: str, ca: Path) -> None:
    """Write the configuration of Mosquitto: TLS, permissions and limits."""
    from fedquilt.tools.identity import commands

    commands.write_broker_config(ca, list(hosts), out, fleet=fleet, listen=listen, installed=installed)


def write_job(job: NewJob, *, force: bool) -> None:
    job.write(force=force)
    for line in (*job.list_notes(), f"wrote {job.path}"):
        print("\n".join(table.fold_line(line)), flush=True)


PrintLine = Callable[[str], None]


def prepare_if_changed(path: Path, job: JobSettings, print_line: PrintLine = progress.LINE.print_to_stdout) -> Path:
    from fedquilt.formats import job_bundle

    folder = home_access.bundle_folder(path)
    return folder if job_bundle.is_current(path, folder) else prepare_bundle(path, job, print_line)


def prepare_bundle(path: Path, job: JobSettings, print_line: PrintLine = progress.LINE.print_to_stdout) -> Path:
    import msgspec

    from fedquilt.formats import job_bundle, toml
    from fedquilt.tools.artefacts import prepare

    folder = home_access.bundle_folder(path)
    with toml.prefix_errors(str(path)), progress.show_progress(f"preparing {folder}"):
        stamped_inputs = job_bundle.stamp_inputs(path, msgspec.to_builtins(job))
        bundle = prepare.prepare_and_check(job, folder, print_line)
        job_bundle.record_inputs(stamped_inputs, folder)
    size = sum(ref.size for ref in bundle.files.values())
    print_line(f"{folder}: {len(bundle.files)} files, {units.format_bytes(size)}")
    return folder


CONNECT_S: Final = 5.0
EXIT_CODES: Final = {"done": 0, "failed": 8, "stopped": 9}


def open_coordinator_link(
    home: Path, broker: options.BrokerOptions, report: Callable[[str], None], connect_s: float = 0.0
) -> tuple[ExclusiveLink, LinkIdentity | None]:
    """Return the link of the fleet's coordinator, and its identity, or None if unsigned.

    `report` receives a warning if messages are unsigned. With `connect_s`, the broker must be connected in this time.

    Raises:
        JobError: If another coordinator of the fleet is running, or the certificate is not a coordinator's.
        LinkError: If the broker must be connected, and is not.
    """
    from fedquilt import wire
    from fedquilt.security import authenticated_link, certificates
    from fedquilt.transport.exclusive_link import make_coordinator_client_id, make_coordinator_link
    from fedquilt.transport.mqtt.broker import Broker as Address
    from fedquilt.transport.mqtt.link import MqttLink

    will = (wire.Topics(broker.fleet).coord, wire.encode(wire.CoordState(online=False)))
    address = Address.from_url(**broker.to_table())
    identity = authenticated_link.load_identity(address)
    if identity is None:
        report(authenticated_link.UNSIGNED)
    if address.cert is not None:
        certificates.require_coordinator_name(address.cert)
    mqtt_link = MqttLink(address, make_coordinator_client_id(broker.fleet), will)
    if connect_s:
        mqtt_link.wait_until_connected(connect_s)
    link = make_coordinator_link(mqtt_link, broker.fleet, home)
    link.require_exclusive_use()
    return link, identity


def run_to_end(
    home: Path, broker: options.BrokerOptions, blobs: options.BlobOptions, store: Store, submit: Callable[[], str]
) -> int:
    """Submit a job, run it to its end, print the next step and return the exit code.

    The job runs in the coordinator that serves the home, or in this process if there is none. This is decided before
    `submit`: if the job stops that coordinator, this process must not take its place. A process that cannot be the
    coordinator submits nothing.
    """
    from fedquilt.coordinator import settings
    from fedquilt.coordinator.views import terminal

    locations, limits = blobs.to_locations(broker.ca), settings.load_limits(home)
    is_local = store.acquire_lock()
    if is_local:
        console = terminal.Console(verbose=verbosity() > 0)
        link, identity = open_coordinator_link(home, broker, console.report, CONNECT_S)
    id = submit()
    place = "this process, its coordinator until it ends" if is_local else f"the coordinator that serves {home}"
    hint = f"from elsewhere: `fedquilt logs {id} --follow --home {home.resolve()}`"
    home_access.print_rows("text", [], [f"{id} runs in {place}; {hint}"])
    if is_local:
        terminal.run_coordinator(
            store, link, broker.fleet, console, only=id, identity=identity, limits=limits, location_settings=locations
        )
    else:
        if blobs.given_options:
            print(f"{blobs.given_options[0]} has no effect: the coordinator that serves {home} has its own options")
        terminal.print_log(store, id, follow=True, verbose=verbosity() > 0)
    return report_end(home, id, store.stored_status(id), f"fedquilt resume {id}")


def report_end(home: Path, id: str, status: str, resume_command: str) -> int:
    next_step = (
        f"interrupted; `{resume_command} --home {shlex.quote(str(home))}` continues it" if status == "running" else ""
    )
    if status == "done" and id:
        next_step = f"`fedquilt model export {id}{options.home_argument(home)} --out FILE` writes the result"
    home_access.print_rows("text", [], [next_step] if next_step else [])
    return EXIT_CODES.get(status, 130)
