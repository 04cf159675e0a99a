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


CHECKS: Final = "Limits of each board's check of a model"
KINDS: Final = ("model", "agent", "settings")
NUMBERS: Final = ("max_w", "telemetry_s")


def parse_settings(words: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise JobError(f"{word!r} is no setting: write budget=1GB labels=+canary, before the options")
        if key in found:
            raise JobError(f"{key} is set twice")
        if key == "labels":
            found[key] = [*filter(None, value.split(","))]
        elif key in NUMBERS:
            try:
                found[key] = float(value)
            except ValueError:
                raise JobError(f"{word!r}: {key} is a number") from None
        else:
            found[key] = value
    return found


def parse_share(text: str) -> float:
    value = units.parse_amount(text if text.endswith("%") else f"{text}%", {"%": 0.01}, "share")
    if not 0 <= value <= 1:
        raise ValueError(f"{text} is not between 0 % and 100 %")
    return round(value, 9)


def parse_points(text: str) -> float:
    value = units.parse_amount(text, {"pt": 0.01, "%": 0.01}, "number of points")
    if not -1 <= value <= 1:
        raise ValueError(f"{text} is not between -100pt and 100pt")
    return round(value, 9)


def parse_size(text: str) -> int:
    from fedquilt.core import JobError
    from fedquilt.edge_agent.settings import parse_size

    try:
        return parse_size(text)
    except JobError as error:
        raise ValueError(str(error)) from None


SHARE = options.ParsedType("share", parse_share)
POINTS = options.ParsedType("points", parse_points)
SIZE = options.ParsedType("size", parse_size)
WHEN: Final = "When"
PHASES: Final = (
    options.label_option("select"),
    option(
        "--phases",
        type=SHARE,
        many=True,
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
        group=WHEN,
    ),
    option(
        "--window",
        default="",
        show_default=False,
        metavar="HH:MM-HH:MM",
        help="Only within this time of the boards' day: 02:00-05:00.",
        group=WHEN,
    ),
    option("--force", is_flag=True, help="Replace the running version also during a task.", group=WHEN),
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

    def make_plan(self, kind: wire.Kind, name: str, **more: Any) -> RolloutPlan:
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
            **more,
        )
        plan.require_valid()
        return plan


def rollout_options(*more: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that adds the options of a rollout. The command gets their values as one argument, `phased`.

    Options in `more` are listed between phases and times, and the command gets them by name.
    """
    return options.group_options("phased", RolloutOptions, *PHASES, *more, *TIMES)


@verb_group()
def rollout() -> None:
    """Roll out a model, an agent version or settings to the devices in phases."""


@rollout.command()
@argument("what", "A run's id, a job's name for its latest run, or a FILE.onnx.", shell_complete=options.complete_runs)
@option("--input-shape", type=options.POSITIVE, many=True, help="Shape of one example of FILE.onnx: 3,224,224.")
@rollout_options(
    option("--min-gain", type=POINTS, metavar="POINTS", help="Least gain in accuracy: -0.5pt.", group=CHECKS),
    option("--max-latency", type=options.TIME, help="Most time of an answer: 40ms.", group=CHECKS),
    option("--max-energy", type=options.ABOVE_0, metavar="J", help="Most joules of an answer.", group=CHECKS),
    option("--max-peak", type=SIZE, help="Most memory of the check: 500MB.", group=CHECKS),
)
@options.home_option
def model(
    what: str,
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
            min_gain=min_gain,
            max_latency_s=max_latency,
            max_energy_j=max_energy,
            max_peak_bytes=max_peak,
        )
        plan = phased.make_plan("model", "", limits=limits)
        if what.endswith(".onnx"):
            file, shape = Path(what), input_shape or None
            payload = b"".join(weights.read_with_external_data(file))
            found = export.require_loadable(payload, file.name, shape)
            plan = replace(plan, name=file.stem[:200], input_shape=shape, versions=found.versions)
            submit_rollout(store, plan, payload, file.name, home)
            return
        if input_shape:
            raise click.UsageError("--input-shape goes with a FILE.onnx", click.get_current_context())
        payload, said = export.encode_for_devices(store, what)
        submit_rollout(store, replace(plan, name=store.find_job(what).id), payload, said, home)


@rollout.command()
@argument("bundle", "What `rollout build` has made.", type=options.PATH)
@rollout_options()
@options.home_option
def agent(bundle: Path, phased: RolloutOptions, home: Path) -> None:
    """Roll out an agent version. Devices undo a failed upgrade."""
    from fedquilt.core import StoreError
    from fedquilt.edge_agent.upgrade import archive

    with home_access.open_existing_home(home) as store:
        with archive.open_bundle(bundle) as opened:
            opened.verify_wheels()
            told, signed = opened.manifest, opened.signature is not None
        try:
            payload = bundle.read_bytes()
        except OSError as error:
            raise StoreError(f"cannot read {bundle}: {error.strerror}") from None
        if not signed:
            print("not signed: only boards whose agent.toml says unsigned = true under [upgrade] take it")
        what = f"fedquilt {told.version} for {told.machine}, Python {told.python}, {len(payload) / 1e6:.1f} MB"
        submit_rollout(store, phased.make_plan("agent", told.version), payload, what, home)


@rollout.command()
@argument(
    "words",
    "All that is set: budget=1GB, labels=+canary,-old, policy=energy, max_w=10, telemetry_s=60; else agent.toml holds.",
    nargs=-1,
    required=True,
    metavar="KEY=VALUE...",
)
@rollout_options()
@options.home_option
def settings(words: tuple[str, ...], phased: RolloutOptions, home: Path) -> None:
    """Set budget, labels, power and telemetry of devices, within their agent.toml."""
    from fedquilt.edge_agent.upgrade import remote_settings

    with home_access.open_existing_home(home) as store:
        given = parse_settings(words)
        remote_settings.parse_remote_settings(given)
        submit_rollout(
            store, phased.make_plan("settings", " ".join(words), settings=given), None, " ".join(words), home
        )


@rollout.command()
@argument("file", "The file to write.", type=options.PATH)
@options.target_option
@options.extras_option
@options.python_option
@option("--whole", is_flag=True, help="Bring all packages, not fedquilt's own alone.")
@options.authority_option
def build(file: Path, target: str, extras: tuple[str, ...], python: str | None, whole: bool, ca: Path) -> None:
    """Build a signed bundle of this agent version for `rollout agent`."""
    from fedquilt.tools.boards import flash as tool

    what = tool.FlashContent(target=target, extras=tuple(filter(None, extras)), python=python)
    with progress.show_progress(f"collecting what {file} takes"):
        tool.write_upgrade_bundle(what, file, ca, whole=whole, say=progress.LINE.print_to_stdout)


@rollout.command()
@argument("id", "Id of a rollout, or its run or version, to show its boards and events.", required=False)
@options.home_option
@options.format_option
def status(id: str | None, home: Path, format: str) -> None:
    """List the rollouts in --home, or show a rollout's steps and uncommitted devices."""
    from fedquilt.coordinator.views import rollouts as view

    with home_access.open_existing_home(home) as store:
        around = view.load_context(home, store.rollouts)
        if id is None:
            known = store.rollouts.readable_rollouts()
            odd = {each: str(why) for each, why in store.rollouts.read_errors().items()}
            none = f"no rollouts in {home}: `fedquilt rollout model RUN --home {home}` begins one"
            held = {each.state.id: view.load_rollout_wait(each, store.rollouts, around) for each in known}
            rows = [{**view.summarise_rollout(each), "waits": held[each.state.id]} for each in known]
            rows += [{"rollout": each, "problem": why} for each, why in odd.items()]
            told = [f"{each} waits for {said}" for each, said in held.items() if said]
            home_access.print_rows(
                format, rows, [*(view.format_rollouts(known, around.now) if known else [none]), *told, *odd.values()]
            )
            return
        kept = store.rollouts.find_rollout(id)
        facts = store.rollouts.read_events(kept.state.id)
        shown = {
            **view.summarise_rollout_and_devices(kept),
            "waits": view.describe_rollout_wait(kept.state, facts, around),
        }
        home_access.print_rows(format, shown, view.format_rollout(kept, facts, around))


@rollout.command()
@argument("what", f"A rollout's id, or {', '.join(KINDS)} for the latest of that kind.")
@options.home_option
def back(what: str, home: Path) -> None:
    """Take a rollout back, or end it early, so that devices return to their former release."""
    from fedquilt.coordinator import run_control

    with home_access.open_existing_home(home) as store:
        if what in KINDS:
            of_kind = [one.state.id for one in store.rollouts.readable_rollouts() if one.state.plan.kind == what]
            if not of_kind:
                raise JobError(f"no rollout of kind {what!r} in {store.home}: there is nothing to take back")
            what = of_kind[-1]
        print(run_control.revert_rollout(store, what))


def submit_rollout(store: Store, plan: RolloutPlan, payload: bytes | None, what: str, home: Path) -> None:
    from fedquilt.coordinator import run_control
    from fedquilt.coordinator.views import rollouts as view

    id = run_control.queue_rollout(store, plan, payload)
    print(f"{id}: {what}; `fedquilt rollout status {id} --home {home}` shows how far it is")
    around = view.load_context(home, store.rollouts)
    if said := view.describe_unmatched_labels(plan, around):
        print(f"it waits for {said}")
    if not around.is_served:
        print(f"no coordinator serves {home}: `fedquilt serve --home {home}` carries it out")
