"""`fedquilt rollout`: model, agent, settings, build, status, back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, option, verb_group
from fedquilt.console import progress, units
from fedquilt.core import JobError

if TYPE_CHECKING:
    from fedquilt import wire
    from fedquilt.coordinator.rounds.rollout import RolloutPlan
    from fedquilt.coordinator.storage.store import Store


CHECK_GROUP: Final = "Limits of each board's check of a model"
KINDS: Final = ("model", "agent", "settings")
NUMERIC_SETTINGS: Final = ("max_w", "telemetry_s")


def parse_settings(assignments: tuple[str, ...]) -> dict[str, Any]:
    settings_: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise JobError(f"{assignment!r} is not a setting: write KEY=VALUE, as in budget=1GB, before the options")
        if key in settings_:
            raise JobError(f"{key} is set twice: set it once")
        if key == "labels":
            settings_[key] = [*filter(None, value.split(","))]
        elif key in NUMERIC_SETTINGS:
            try:
                settings_[key] = float(value)
            except ValueError:
                raise JobError(f"{assignment!r} has no number: write {key}=10") from None
        else:
            settings_[key] = value
    return settings_


def parse_share(text: str) -> float:
    """Return the share from 0 to 1 in a text such as "5%" or "5", or raise ValueError."""
    value = units.parse_amount(text if text.endswith("%") else f"{text}%", {"%": 0.01}, "share")
    if not 0 <= value <= 1:
        raise ValueError(f"{text} is not between 0 % and 100 %")
    return round(value, 9)


def parse_points(text: str) -> float:
    """Return the difference, -1 to 1, in a text of points such as "-0.5pt", or raise ValueError."""
    value = units.parse_amount(text, {"pt": 0.01, "%": 0.01}, "number of points")
    if not -1 <= value <= 1:
        raise ValueError(f"{text} is not between -100pt and 100pt")
    return round(value, 9)


def parse_size(text: str) -> int:
    from fedquilt.edge_agent.settings import parse_size

    try:
        return parse_size(text)
    except JobError as error:
        raise ValueError(str(error)) from None


SHARE = options.ParsedType("share", parse_share)
POINTS = options.ParsedType("points", parse_points)
SIZE = options.ParsedType("size", parse_size)
TIME_GROUP: Final = "When"
PHASES: Final = (
    options.label_option("select"),
    option(
        "--phases",
        type=SHARE,
        variadic=True,
        default=("5%", "25%", "100%"),
        help="Cumulative shares of boards, one for each phase; the first is the canary.",
    ),
    option("--abort-above", type=SHARE, default="10%", help="Roll back if more than this share of the boards failed."),
    option(
        "--patience",
        type=options.TIME,
        default="10min",
        help="Time after which a phase no longer waits for silent boards.",
    ),
)
TIMES: Final = (
    option(
        "--soak",
        type=options.TIME,
        default="60s",
        help="Time without failures before a board commits the release.",
        group=TIME_GROUP,
    ),
    option(
        "--window",
        default="",
        show_default=False,
        metavar="HH:MM-HH:MM",
        help="Only within this time of the boards' day: 02:00-05:00.",
        group=TIME_GROUP,
    ),
    option("--force", is_flag=True, help="Replace the running version also during a task.", group=TIME_GROUP),
)


@dataclass(frozen=True)
class RolloutOptions:
    select: tuple[str, ...]
    phases: tuple[float, ...]
    abort_above: float
    patience: float
    soak: float
    window: str
    force: bool

    def make_plan(self, kind: wire.ReleaseKind, name: str, **plan_fields: Any) -> RolloutPlan:
        from fedquilt.coordinator.rounds.rollout import RolloutPlan

        plan = RolloutPlan(
            kind=kind,
            name=name[:200],
            select=self.select,
            canary=self.phases[0],
            phases=self.phases[1:],
            abort_above=self.abort_above,
            patience_s=self.patience,
            soak_s=self.soak,
            window=self.window,
            force=self.force,
            **plan_fields,
        )
        plan.require_valid()
        return plan


def rollout_options(*extra_options: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that adds a rollout's options and passes them as `phased`, a `RolloutOptions`.

    `extra_options` appear in --help between the options for phases and for times, and are passed by name.
    """
    return options.group_options("phased", RolloutOptions, *PHASES, *extra_options, *TIMES)


@verb_group()
def rollout() -> None:
    """Roll out a model, an agent version or settings to the devices in phases."""


@rollout.command()
@argument(
    "source",
    "A run's id, a job's name for its latest run, or a FILE.onnx.",
    metavar="WHAT",
    shell_complete=options.complete_runs,
)
@option("--input-shape", type=options.POSITIVE, variadic=True, help="Shape of one example of FILE.onnx: 3,224,224.")
@rollout_options(
    option("--min-gain", type=POINTS, metavar="POINTS", help="Smallest gain in accuracy: -0.5pt.", group=CHECK_GROUP),
    option("--max-latency", type=options.TIME, help="Longest time of a prediction: 40ms.", group=CHECK_GROUP),
    option(
        "--max-energy",
        type=options.POSITIVE_NUMBER,
        metavar="J",
        help="Most joules of a prediction.",
        group=CHECK_GROUP,
    ),
    option("--max-peak", type=SIZE, help="Largest memory of the check: 500MB.", group=CHECK_GROUP),
)
@options.home_option
def model(
    source: str,
    input_shape: tuple[int, ...],
    phased: RolloutOptions,
    min_gain: float | None,
    max_latency: float | None,
    max_energy: float | None,
    max_peak: int | None,
    home: Path,
) -> None:
    """Roll out a run's result, or an ONNX file."""
    from msgspec.structs import replace

    from fedquilt import wire
    from fedquilt.onnx import weights
    from fedquilt.tools.artefacts import export

    with home_access.open_existing_home(home) as store:
        limits = wire.ReleaseLimits(
            min_gain=min_gain, max_latency_s=max_latency, max_energy_j=max_energy, max_peak_bytes=max_peak
        )
        plan = phased.make_plan("model", "", limits=limits)
        if source.endswith(".onnx"):
            file, shape = Path(source), input_shape or None
            payload = b"".join(weights.read_with_external_data(file))
            export.require_loadable(payload, file.name, shape)
            plan = replace(plan, name=file.stem[:200], input_shape=shape)
            submit_rollout(store, plan, payload, file.name, home)
            return
        if input_shape:
            raise click.UsageError("--input-shape requires a FILE.onnx", click.get_current_context())
        payload, description = export.encode_for_devices(store, source)
        submit_rollout(store, replace(plan, name=store.find_job(source).id), payload, description, home)


@rollout.command()
@argument("bundle", "Bundle written by `rollout build`.", type=options.PATH)
@rollout_options()
@options.home_option
def agent(bundle: Path, phased: RolloutOptions, home: Path) -> None:
    """Roll out an agent version. Devices undo a failed upgrade."""
    from fedquilt.core import StoreError
    from fedquilt.edge_agent.upgrade import archive

    with home_access.open_existing_home(home) as store:
        with archive.open_bundle(bundle) as opened:
            opened.verify_wheels()
            manifest, is_signed = opened.manifest, opened.signature is not None
        try:
            payload = bundle.read_bytes()
        except OSError as error:
            raise StoreError(f"cannot read {bundle}: {error.strerror}") from None
        if not is_signed:
            print("not signed: only boards with unsigned = true under [upgrade] in agent.toml accept it")
        description = (
            f"fedquilt {manifest.version} for {manifest.machine}, Python {manifest.python}, {len(payload) / 1e6:.1f} MB"
        )
        submit_rollout(store, phased.make_plan("agent", manifest.version), payload, description, home)


@rollout.command()
@argument(
    "assignments",
    "Settings: budget=1GB, labels=+canary,-old, policy=energy, max_w=10, telemetry_s=60; others as in agent.toml.",
    nargs=-1,
    required=True,
    metavar="KEY=VALUE...",
)
@rollout_options()
@options.home_option
def settings(assignments: tuple[str, ...], phased: RolloutOptions, home: Path) -> None:
    """Set budget, labels, power and telemetry of devices, within their agent.toml."""
    from fedquilt.edge_agent.upgrade import remote_settings

    with home_access.open_existing_home(home) as store:
        remote_table = parse_settings(assignments)
        remote_settings.parse_remote_settings(remote_table)
        submit_rollout(
            store,
            phased.make_plan("settings", " ".join(assignments), settings=remote_table),
            None,
            " ".join(assignments),
            home,
        )


@rollout.command()
@argument("file", "The file to write.", type=options.PATH)
@options.target_option
@options.extras_option
@options.python_option
@option("--whole", is_flag=True, help="Include all packages, not only fedquilt's.")
@options.authority_option
def build(file: Path, target: str, extras: tuple[str, ...], python: str | None, whole: bool, ca: Path) -> None:
    """Build a signed bundle of this agent version for `rollout agent`."""
    from fedquilt.tools.boards import flash as tool

    content = tool.FlashContent(target=target, extras=tuple(filter(None, extras)), python=python)
    with progress.show_progress(f"collecting packages for {file}"):
        tool.write_upgrade_bundle(content, file, ca, with_dependencies=whole, print_line=progress.LINE.print_to_stdout)


@rollout.command()
@argument("id", "Id of a rollout, or its run or version, to show its boards and events.", required=False)
@options.home_option
@options.format_option
def status(id: str | None, home: Path, format: str) -> None:
    """List the rollouts in --home, or show a rollout's steps and uncommitted devices."""
    from fedquilt.coordinator.views import rollouts as view

    with home_access.open_existing_home(home) as store:
        context = view.load_context(home, store.rollouts)
        if id is None:
            readable = store.rollouts.readable_rollouts()
            problems = {rollout_id: str(error) for rollout_id, error in store.rollouts.read_errors().items()}
            waits = {row.state.id: view.load_rollout_wait(row, store.rollouts, context) for row in readable}
            rows = [{**view.summarise_rollout(row), "waits": waits[row.state.id]} for row in readable]
            rows += [{"rollout": rollout_id, "problem": problem} for rollout_id, problem in problems.items()]
            lines = [f"no rollouts in {home}: start one with `fedquilt rollout model RUN --home {home}`"]
            if readable:
                lines = view.format_rollouts(readable, context.now)
            notes = [f"{rollout_id} waits for {reason}" for rollout_id, reason in waits.items() if reason]
            home_access.print_rows(format, rows, [*lines, *notes, *problems.values()])
            return
        row = store.rollouts.find_rollout(id)
        events = store.rollouts.read_events(row.state.id)
        details = {
            **view.summarise_rollout_and_devices(row),
            "waits": view.describe_rollout_wait(row.state, events, context),
        }
        home_access.print_rows(format, details, view.format_rollout(row, events, context))


@rollout.command()
@argument("rollout_id", f"A rollout's id, or {', '.join(KINDS)} for the latest of that kind.", metavar="WHAT")
@options.home_option
def back(rollout_id: str, home: Path) -> None:
    """Roll a rollout back, or end it early, so that devices return to their previous release.

    A device stores one earlier release. A rollout with a later one in use on its devices cannot be rolled back.
    """
    from fedquilt.coordinator import run_control

    with home_access.open_existing_home(home) as store:
        if rollout_id in KINDS:
            kind = rollout_id
            ids_of_kind = [row.state.id for row in store.rollouts.readable_rollouts() if row.state.plan.kind == kind]
            if not ids_of_kind:
                raise JobError(f"no rollout of kind {kind!r} in {store.home}: name another kind or id")
            rollout_id = ids_of_kind[-1]
        print(run_control.revert_rollout(store, rollout_id))


def submit_rollout(store: Store, plan: RolloutPlan, payload: bytes | None, description: str, home: Path) -> None:
    from fedquilt.coordinator import run_control
    from fedquilt.coordinator.views import rollouts as view

    id = run_control.queue_rollout(store, plan, payload)
    print(f"{id}: {description}; `fedquilt rollout status {id} --home {home}` shows its progress")
    context = view.load_context(home, store.rollouts)
    if wait_reason := view.describe_unmatched_labels(plan, context):
        print(f"it waits for {wait_reason}")
    if not context.is_served:
        print(f"no coordinator is running for {home}: start one with `fedquilt serve --home {home}`")
