"""Settings of a job and limits of a coordinator, read from TOML files and strictly validated."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from fedquilt import methods, metrics, plugins
from fedquilt.console import units
from fedquilt.coordinator import privacy_settings
from fedquilt.core import CODECS, Bundle, Encoding, JobError, Method, Name, SiteRight
from fedquilt.costs import peak_memory
from fedquilt.costs.cost_model import LinkCost
from fedquilt.data import reading_settings
from fedquilt.formats import labels, toml, training_choices
from fedquilt.host import http_server

NOT_NETWORK: Final = ("weights", "weights_classes", "seed", "tier")  # keys of [model] that do not build the network


class StalenessSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights of updates by staleness, the number of commits since their state: [cohort] staleness.

    The functions are those of FedAsync (Xie et al. 2019, section 5.2). FedBuff (Nguyen et al. 2022) uses the polynomial
    with a = 0.5.
    """

    function: Literal["constant", "polynomial", "hinge"] = "polynomial"
    a: Annotated[float, Meta(gt=0)] | None = None  # exponent, default 0.5, or slope of the hinge, default 10
    b: Annotated[int, Meta(ge=0)] | None = None  # largest staleness with the weight 1 of the hinge, default 4
    max: Annotated[int, Meta(ge=0, le=1000)] = 20  # largest staleness of an open task

    def weight(self, staleness: int) -> float:
        if self.function == "polynomial":
            return float((1 + staleness) ** -(self.a or 0.5))
        steps_over = max(staleness - (4 if self.b is None else self.b), 0) if self.function == "hinge" else 0
        return 1 / ((self.a or 10.0) * steps_over + 1)


class CohortSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # "buffered" commits every `size` updates, "auto" chooses a mode at the start of the job
    mode: Literal["synchronous", "buffered", "auto"] = "synchronous"
    fair: Literal["off", "contributions"] = "off"  # in buffered mode, whether fast devices wait (rounds/buffering.py)
    concurrency: Annotated[int, Meta(ge=0)] = 0  # devices at work in buffered mode, or 0 for all present devices
    staleness: StalenessSettings = StalenessSettings()  # in buffered mode
    size: Annotated[int, Meta(ge=0)] = 0  # number of updates per round, or 0 for all present devices
    min_devices: Annotated[int, Meta(ge=0)] = 0  # fewest devices of a round, or 0 for `decisions.minimum_updates`
    start_devices: Annotated[int, Meta(ge=0)] = 0  # fewest devices to start the first round
    over_select: Annotated[float, Meta(ge=0, le=4)] = 0.0  # devices selected beyond `size`, as a share of `size`
    quorum: Annotated[float, Meta(gt=0, le=1)] = 1.0  # share of `size` that is enough at the deadline
    deadline_s: Annotated[float, Meta(gt=0)] = 600.0  # longest duration of an attempt
    deadline: Literal["fixed", "predicted", "paper", "energy"] = "fixed"  # policy of rounds/deadline.py
    joules_per_round: Annotated[float, Meta(gt=0)] | None = None  # joule limit of a round, with "energy"
    attempts: Annotated[int, Meta(ge=1)] = 3  # attempts at a round without quorum before the job fails
    prefer: Literal["random", "energy"] = "random"  # "energy" prefers devices that need fewer joules for the same work
    turns: Annotated[float, Meta(gt=0)] = 3.0  # wait after which a device precedes all others (rounds/selection.py)
    min_battery: Annotated[float, Meta(ge=0, le=1)] = 0.0  # least battery charge of a device that is not charging
    max_temperature_c: Annotated[float, Meta(gt=0)] | None = None  # highest temperature of a selected device
    # largest weight of a device, or None for 100 times the median
    max_examples: Annotated[int, Meta(ge=1)] | None = None
    select: tuple[str, ...] = ()  # conditions on device labels, all required (fedquilt.formats.labels)


class JobLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of a job ([stop]), which are checked between rounds. None means no limit."""

    patience: Annotated[int, Meta(ge=1)] | None = None  # evaluations in a row without a gain
    min_gain: Annotated[float, Meta(ge=0, le=1e9)] = 0.0  # smallest counted gain of the main metric

    max_joules: Annotated[float, Meta(gt=0)] | None = None  # gross joules of all metered tasks
    max_bytes: Annotated[int, Meta(gt=0)] | None = None  # transferred bytes of blobs, down and up
    max_wall_s: Annotated[float, Meta(gt=0)] | None = None  # duration of all committed rounds


class EvaluationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    every: Annotated[int, Meta(ge=0)] = 0  # rounds between evaluations, or 0 for none
    beside: bool = False  # whether the coordinator's process evaluates instead of the devices


class PersonalSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prior: Literal["auto", "off"] = "off"  # "auto" adds class priors if they help on held-out examples


class AdversarySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    share: Annotated[float, Meta(gt=0, lt=1)]  # share of the fleet, rounded up, drawn with the job's seed
    attack: Literal["scaled", "sign_flip", "label_flip", "inner_product"]
    factor: Annotated[float, Meta(gt=0)] = 10.0  # factor of "scaled" and "sign_flip", epsilon of "inner_product"


class FailureSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Simulated devices that go offline permanently ([fleet] failures)."""

    share: Annotated[float, Meta(gt=0, lt=1)]  # share of the fleet, rounded up, drawn with the job's seed
    within_s: Annotated[float, Meta(gt=0)]  # virtual seconds in which they fail, each at a random time


class DriftTrigger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Condition on model runners (`fedquilt model serve`) that starts a job: [trigger]."""

    drift_above: Annotated[float, Meta(ge=0, lt=1)] = 0.3  # a device with a larger drift counts
    accuracy_below: Annotated[float, Meta(gt=0, le=1)] | None = None  # a device with a smaller accuracy counts too
    # share of the selected devices that report drift
    boards: Annotated[str, Meta(pattern=r"^\d{1,3}(\.\d{1,3})?%\Z")] = "25%"
    pause: str = "12h"  # shortest time between two starts
    approve: bool = False  # whether started runs wait for `fedquilt resume`

    @property
    def share(self) -> float:
        share = float(self.boards.removesuffix("%")) / 100
        if not 0 < share <= 1:
            raise JobError(f'[trigger] boards = "{self.boards}": set a share above 0 % and up to 100 %')
        return share

    @property
    def pause_s(self) -> float:
        try:
            return units.parse_seconds(self.pause)
        except ValueError as error:
            raise JobError(f"[trigger] pause = {error}") from None


if TYPE_CHECKING:
    TextSequence: TypeAlias = Sequence[str]  # `fedquilt.Fleet` takes a list, too
else:
    TextSequence = tuple[str, ...]


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Simulated fleet of `fedquilt simulate` and `fedquilt demo` ([fleet]).

    A list with fewer entries than devices starts again after its last entry.
    """

    devices: Annotated[int, Meta(ge=1, le=1_000_000)] = 4
    boards: Annotated[TextSequence, Meta(min_length=1)] = ("x86-host",)
    budgets: Annotated[TextSequence, Meta(min_length=1)] = ("512MB",)
    policy: Literal["energy", "paper", "max", "board"] = "energy"  # edge_agent/power/governor.py
    adversaries: AdversarySettings | None = None  # only for `compare`, `lab reproduce` and `fedquilt.simulate`
    failures: FailureSettings | None = None  # only for simulations without agents
    labels: TextSequence = ()  # labels of each device, separated by spaces
    links: TextSequence = ()  # link of each device in virtual time, such as "2MB/s 50ms", or () for instant transfers

    def device_link(self, index: int) -> LinkCost:
        """Return the link of a simulated device, unlimited by default. Raise JobError if it is invalid."""
        if not self.links:
            return LinkCost()
        try:
            return LinkCost.parse(self.links[index % len(self.links)])
        except ValueError as error:
            raise JobError(f"[fleet] links: {error}") from None

    def device_labels(self, index: int) -> tuple[str, ...]:
        return labels.parse_labels(labels.split_words(self.labels[index % len(self.labels)])) if self.labels else ()

    def count_selected_devices(self, cohort: CohortSettings, devices: int) -> int:
        return sum(labels.is_selected(cohort.select, self.device_labels(index)) for index in range(devices))

    def require_enough_devices(self, cohort: CohortSettings, devices: int) -> None:
        """Raise JobError if fewer devices match [cohort] select than [cohort] size, or if a link is invalid."""
        available = self.count_selected_devices(cohort, devices)
        for index in range(len(self.links)):
            self.device_link(index)
        if cohort.select and not available:
            raise JobError(f"[cohort] select = {list(cohort.select)}: no simulated device has these [fleet] labels")
        if cohort.size > available:
            of_selection = " of [cohort] select" if cohort.select else ""
            raise JobError(
                f"[cohort] size = {cohort.size}, but the fleet has {available} devices{of_selection}: reduce size, or "
                "simulate more devices ([fleet] devices, or --devices)"
            )


class JobSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9._-]{0,39}\Z")]
    method: str
    rounds: Annotated[int, Meta(ge=1, le=1_000_000)] = 10  # largest number of rounds
    seed: Annotated[int, Meta(ge=0, le=2**53)] = 0
    priority: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # share of device time relative to other jobs
    engine: str | None = None  # engine of the method, or None for each device's first usable engine
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    cohort: CohortSettings = CohortSettings()
    wire: Encoding = Encoding()
    stop: JobLimits = JobLimits()
    check: EvaluationSettings = EvaluationSettings()
    personal: PersonalSettings = PersonalSettings()
    privacy: privacy_settings.PrivacySettings | None = None
    trigger: DriftTrigger | None = None  # condition that starts runs of the job
    fleet: FleetSettings = FleetSettings()
    data: dict[str, Any] = msgspec.field(default_factory=dict)  # fedquilt.data.spec.DataSpec
    test: dict[str, Any] = msgspec.field(default_factory=dict)  # DataSpec of examples that no device has
    compare: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)  # method -> params
    public: dict[str, Any] = msgspec.field(default_factory=dict)  # DataSpec of examples that all devices get
    model: dict[str, Any] = msgspec.field(default_factory=dict)  # fedquilt.tools.artefacts.prepare
    schedule: dict[str, Any] = msgspec.field(default_factory=dict)  # fedquilt.tools.artefacts.frozen_part
    input: dict[str, Any] = msgspec.field(default_factory=dict)
    labels: tuple[str, ...] = ()
    donors: tuple[dict[str, Any], ...] = ()


def load_job(path: Path) -> JobSettings:
    """Read a job from a TOML file. Relative paths start at its folder. Raise JobError if it is invalid."""
    table = toml.read_toml(path)
    try:
        if "device" in table and "method" not in table:
            raise JobError("these are an agent's settings, not a job: `fedquilt agent` reads them")
        return parse_job(complete_table(table, path.parent))
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def parse_job(table: Mapping[str, Any]) -> JobSettings:
    """Return the job in a table. Raise JobError if a setting is invalid or contradicts another."""
    _require_params_in_table(table)
    job = _unify_task_and_classes(toml.convert_table(table, JobSettings, "a job"))
    params = parse_params(job)
    if job.wire.codec not in CODECS:
        raise JobError(f"[wire] codec = {job.wire.codec!r} is unknown: choose {', '.join(CODECS)}")
    method = methods.load(job.method)
    require_supported_task(job.method, method, job.model)
    if tier_models(job.model) and not method.traits.tier_networks:
        raise JobError(
            f"[model.tier]: {job.method} has one network for all devices: leave the table out, or use fedmd or fedproto"
        )
    if (reason := method.traits.refused_codecs.get(job.wire.codec)) is not None:
        raise JobError(f"[wire] codec = {job.wire.codec!r}: {reason}")
    if job.wire.codec != "raw" and method.traits.exact_updates:
        raise JobError(
            f"[wire] codec = {job.wire.codec!r} rounds updates, but {job.method} requires exact updates: set 'raw'"
        )
    require_minimum_updates(job, method.minimum_updates(params))
    if job.personal.prior == "auto" and (task := metrics.task_from_network(job.model)) != "classes":
        raise JobError(f'[personal] prior = "auto" needs classes, but task = {task!r}: set "off"')
    require_energy_deadline(job.cohort)
    require_buffered_settings(job, method)
    privacy_settings.require_private_settings(job, method)
    require_evaluations(job)
    if job.trigger is not None:
        _ = job.trigger.share, job.trigger.pause_s
    with toml.prefix_errors("[cohort] select"):
        labels.require_valid_selection(job.cohort.select)
    with toml.prefix_errors("[fleet] labels"):
        for index in range(len(job.fleet.labels)):
            job.fleet.device_labels(index)
    adversaries = job.fleet.adversaries
    if adversaries is not None and adversaries.attack == "inner_product" and job.wire.codec != "raw":
        raise JobError(f"[wire] codec = {job.wire.codec!r} is not supported with the attack 'inner_product': set 'raw'")
    return job


def require_minimum_updates(job: JobSettings, min_updates: int) -> None:
    """Raise JobError if a round could close with fewer than the method's `min_updates` updates."""
    cohort = job.cohort
    if cohort.size and cohort.size < min_updates:
        raise JobError(
            f"[cohort] size = {cohort.size} is too small: with its [params] {job.method} needs at least "
            f"{min_updates} updates in a round"
        )
    fewest_updates = max(cohort.min_devices, math.ceil(cohort.size * cohort.quorum), 1)
    if fewest_updates < min_updates:
        raise JobError(
            f"[cohort] allows rounds with {fewest_updates} {'update' if fewest_updates == 1 else 'updates'}, but "
            f"with these [params] {job.method} needs at least {min_updates}: set min_devices = {min_updates}"
        )


def require_energy_deadline(cohort: CohortSettings) -> None:
    if cohort.joules_per_round is not None and cohort.deadline != "energy":
        raise JobError('[cohort] joules_per_round has no effect without deadline = "energy": set both, or remove it')


def require_buffered_settings(job: JobSettings, method: Method) -> None:
    """Raise JobError if buffered mode contradicts another setting, or if its keys are set without it."""
    cohort, staleness = job.cohort, job.cohort.staleness
    if cohort.mode == "synchronous":
        for key in ("concurrency", "fair", "staleness"):
            if getattr(cohort, key) != getattr(CohortSettings(), key):
                raise JobError(
                    f'[cohort] {key} has no effect without mode = "buffered" or "auto": set a mode, or leave it out'
                )
        return
    problems = {
        "needs size, the number of updates per commit: set size = 10, or 1 for FedAsync": not cohort.size,
        "has no over_select: set concurrency, the number of devices at work": bool(cohort.over_select),
        f'has no rounds to plan by deadline = "{cohort.deadline}": set "fixed" or "predicted"': cohort.deadline
        not in ("fixed", "predicted"),
        "has no rounds in which devices evaluate: set [check] beside = true, or every = 0": bool(job.check.every)
        and not job.check.beside,
        f'has staleness.a and b only for other functions than "{staleness.function}"': (
            staleness.function == "constant" and staleness.a is not None
        )
        or (staleness.function != "hinge" and staleness.b is not None),
    }
    for problem, is_present in problems.items():
        if is_present:
            raise JobError(f'[cohort] mode = "{cohort.mode}" {problem}')
    if method.aggregation.change is None:
        raise JobError(
            f'[cohort] mode = "{cohort.mode}": {job.method} combines only updates of one state; take a method that can '
            "apply an update of an earlier state, such as fedavg, fedprox, fedopt, fedsq or genefl"
        )


def require_evaluations(job: JobSettings) -> None:
    """Raise JobError if the settings of [stop] need evaluations by devices that [check] does not provide."""
    if job.stop.patience is None and job.stop.min_gain:
        raise JobError(
            f"[stop] min_gain = {job.stop.min_gain:g} has no effect without patience: set both, or remove it"
        )
    if job.stop.patience is not None and (not job.check.every or job.check.beside):
        fix = "remove [check] beside" if job.check.every else "set [check] every = 1"
        raise JobError(f"[stop] patience = {job.stop.patience} needs evaluations by devices: {fix}")


def require_no_simulated_faults(job: JobSettings) -> None:
    for key in ("adversaries", "failures"):
        if getattr(job.fleet, key) is not None:
            raise JobError(
                f"[fleet] {key} have no effect on agents: use `fedquilt compare`, `fedquilt lab reproduce` or "
                "fedquilt.simulate, or remove them"
            )


def require_supported_task(method_name: str, method: Method, network: Mapping[str, Any]) -> None:
    if (task := metrics.task_from_network(network)) not in method.traits.prediction_tasks:
        raise JobError(
            f"task = {task!r} is not supported by {method_name}, which needs "
            f"{' or '.join(map(repr, method.traits.prediction_tasks))}: choose another method, such as fedavg"
        )


def _unify_task_and_classes(job: JobSettings) -> JobSettings:
    """Return the job with [model] outputs renamed to `classes`, and one task in [model] and [data]."""
    model, data = job.model, job.data
    if "outputs" in model:
        if "classes" in model:
            raise JobError("[model] outputs and classes have the same meaning: keep one of them")
        model = {("classes" if key == "outputs" else key): value for key, value in model.items()}
    tasks = {table["task"] for table in (model, data) if "task" in table}
    if len(tasks) > 1:
        raise JobError(f"[model] task = {model['task']!r} and [data] task = {data['task']!r} differ: set the same task")
    for task in tasks:
        metrics.task_from_network({"task": task})
        model = {**model, "task": task} if model else model
        data = {**data, "task": task} if data else data
    return msgspec.structs.replace(job, model=model, data=data)


def tier_models(model: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the complete [model] table of each memory tier in [model.tier], or raise JobError."""
    tiers, plain = model.get("tier", {}), {key: value for key, value in model.items() if key != "tier"}
    if not isinstance(tiers, Mapping) or not all(isinstance(table, Mapping) for table in tiers.values()):
        raise JobError("[model.tier] needs a table for each tier: write [model.tier.4GB]")
    if unknown := sorted(tiers.keys() - peak_memory.TIER_BYTES.keys()):
        raise JobError(f"[model.tier] {unknown[0]}: there are {', '.join(peak_memory.TIER_BYTES)}")
    common = {key: value for key, value in plain.items() if key in ("input", "classes", "task", "seed")}
    return {tier: {**(common if "name" in table else plain), **table} for tier, table in tiers.items()}


def _require_params_in_table(table: Mapping[str, Any]) -> None:
    if not isinstance(method := table.get("method"), str):
        return  # `convert_table` reports a missing method
    job_keys = {field.encode_name for field in msgspec.structs.fields(JobSettings)}
    for key in table.keys() - job_keys:
        params_type = methods.load(method).params
        if key in (field.name for field in dataclasses.fields(params_type)):
            raise JobError(f"{key} = {table[key]!r} is a parameter of the method: move the line below a line [params]")


def parse_params(job: JobSettings) -> Any:
    """Return the method's `Params`, or raise JobError for an invalid parameter or unsupported engine."""
    method = methods.load(job.method)
    if not supports_engine(method, job.engine):
        raise JobError(
            f"engine = {job.engine!r} is not supported by {job.method}: choose {' or '.join(method.engines)}"
        )
    params_type = method.params
    infinite_names = [
        name for name, value in job.params.items() if isinstance(value, float) and not math.isfinite(value)
    ]
    if infinite_names:
        raise JobError(f"[params] {', '.join(infinite_names)}: the value is not a finite number")
    parameter_names = [field.name for field in dataclasses.fields(params_type)]
    unknown = sorted(set(job.params) - set(parameter_names))
    if unknown:
        choices_text = toml.describe_choices(unknown[0], parameter_names, "it has")
        raise JobError(f"[params] {', '.join(unknown)}: {job.method} has no such parameter{choices_text}")
    params: Any = toml.convert_table(job.params, params_type, f"[params] of {job.method}")
    # msgspec leaves defaults out of an object's own dict
    values = {name: getattr(params, name) for name in parameter_names}
    choices = training_choices.select_choices(params_type, values)
    if choices:
        values["schedule"] = training_choices.schedule_with_rounds(values["schedule"], job.rounds)
    if job.engine == "numpy" and (torch_choices := training_choices.describe_torch_choices(choices)):
        raise JobError(f'engine = "numpy" does not support {torch_choices}: remove the line, so that devices use torch')
    for kind_of_plugin, name in training_choices.list_plugins(choices):
        with toml.prefix_errors("[params]"):
            plugins.find_plugin(kind_of_plugin, name, training_choices.BUILT_IN_CHOICES[kind_of_plugin])
    return params_type(**values)


def select_shared_params(
    method: str, shared: Mapping[str, Any], own_params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the largest part of the shared parameters that a method has and accepts together with its own."""
    params_type, own_params = methods.load(method).params, own_params or {}
    known_names = {field.name for field in dataclasses.fields(params_type)}
    candidates = {key: value for key, value in shared.items() if key in known_names - own_params.keys()}
    for count in range(len(candidates), 0, -1):
        for names in itertools.combinations(candidates, count):
            selected = {name: candidates[name] for name in names}
            with contextlib.suppress(JobError):
                toml.convert_table({**selected, **own_params}, params_type, "[params]")
                return selected
    return {}


def supports_engine(method: Method, engine: str | None) -> bool:
    return engine in (None, *method.engines, *plugins.plugin_names("engine"))


def list_engines(job: JobSettings, method: Method) -> tuple[str, ...]:
    """Return the engines that support a job's method and [params], preferred first."""
    if job.engine:
        return (job.engine,)
    choices = training_choices.select_choices(method.params, job.params)
    torch_only = bool(training_choices.describe_torch_choices(choices))
    return tuple(name for name in method.engines if name != "numpy" or not torch_only)


def complete_table(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a job's table with absolute paths, and with the [data] settings that depend on the data."""
    result = make_paths_absolute(table, folder)
    if isinstance(data := result.get("data"), dict):
        result["data"] = reading_settings.complete_data_table(data)
    return result


def make_paths_absolute(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a job's table with absolute paths. `weights` and `classes` are paths if the file exists."""

    def anchor_paths(entry: Any) -> Any:
        if isinstance(entry, list):
            return [anchor_paths(item) for item in entry]
        if not isinstance(entry, dict):
            return entry
        return {
            key: toml.absolute_path(value, folder)
            if isinstance(value, str)
            and (key in ("path", "vocabulary") or (key in ("weights", "classes") and os.path.isfile(folder / value)))
            else (anchor_paths(value) if key in ("sources", "text", "tier", *peak_memory.TIER_BYTES) else value)
            for key, value in entry.items()
        }

    result = dict(table)
    for key in ("data", "test", "public", "model", "donors", "schedule"):
        if key in result:
            result[key] = anchor_paths(result[key])
    return result


LIMITS_FILE: Final = "limits.toml"


class SubmitterLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    running: Annotated[int, Meta(ge=1)] = 8  # jobs at once
    # largest share of the online devices leased to the submitter's jobs
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0


class RetentionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Retention of ended runs: [retention]. Runs that exceed every limit that is set are deleted."""

    keep: Annotated[int, Meta(ge=0)] | None = None
    older_than: str | None = None  # time since the end of a run

    @property
    def older_than_s(self) -> float | None:
        if self.older_than is None:
            return None
        try:
            return units.parse_seconds(self.older_than)
        except ValueError as error:
            raise JobError(f"[retention] older_than = {error}") from None


class CoordinatorLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    running: Annotated[int, Meta(ge=1)] = 8  # jobs at once
    submitter: SubmitterLimits = SubmitterLimits()
    retention: RetentionSettings = RetentionSettings()
    sites: dict[Name, SiteRight] = {}  # site rights in a fleet without certificates: [sites.NAME]
    # limits of the blob server and of the dashboard
    http: http_server.ConnectionLimits = http_server.ConnectionLimits()
    waiting_mb: Annotated[int, Meta(ge=1)] = 800  # megabytes of large updates that are in transfer or not folded yet


def load_limits(home: Path) -> CoordinatorLimits:
    path = home / LIMITS_FILE
    if not path.exists():
        return CoordinatorLimits()
    with toml.prefix_errors(str(path)):
        limits: CoordinatorLimits = toml.convert_table(
            toml.read_toml(path), CoordinatorLimits, "a coordinator's settings"
        )
        _ = limits.retention.older_than_s
        _require_disjoint_sites(limits.sites)
    return limits


def _require_disjoint_sites(sites: Mapping[str, SiteRight]) -> None:
    for (site, right), (other_site, other_right) in itertools.combinations(sites.items(), 2):
        if right.overlaps(other_right):
            raise JobError(
                f"[sites]: {site} and {other_site} may submit for the same device: assign each device to one site"
            )


ENGINES: Final = ("numpy", "onnx", "torch")  # built-in engines (edge_agent/engines)
NUMPY_TRAINS: Final = "mlp"  # the only network of edge_agent/engines/numpy_engine.py


def create_initial_state(job: JobSettings, bundle: Bundle, method: Method | None = None) -> Any:
    """Return the method's state before the first round. Raise JobError if it does not support the job."""
    method = method or methods.load(job.method)
    if job.check.every and method.check is None:
        raise JobError(f"[check] every = {job.check.every}: {job.method} has no evaluation by devices. Set 0")
    network = bundle.meta.get("network", {})
    require_supported_task(job.method, method, network)
    if job.engine == "numpy" and network.get("name", NUMPY_TRAINS) != NUMPY_TRAINS:
        raise JobError(
            f'engine = "numpy" trains only {NUMPY_TRAINS!r} networks, and [model] is {network.get("name")!r}: remove '
            "the line, so that devices train with torch"
        )
    return privacy_settings.require_private_network(job, method, method.init(bundle, parse_params(job), job.seed))


def required_packages(job: JobSettings, bundle: Bundle) -> dict[str, str]:
    """Return the packages that devices need besides fedquilt: module -> version and sha256."""
    packages = methods.required_plugins(job.method)
    if job.engine is not None and job.engine not in ENGINES:
        packages |= plugins.required_modules("engine", job.engine)
    choices = training_choices.select_choices(methods.load(job.method).params, job.params)
    for kind, name in training_choices.list_plugins(choices):
        packages |= plugins.required_modules(kind, name, training_choices.BUILT_IN_CHOICES[kind])
    bundle_packages = bundle.meta.get("plugins")
    return dict(sorted({**packages, **(bundle_packages if isinstance(bundle_packages, Mapping) else {})}.items()))


def _network_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in ("input", *NOT_NETWORK)}


def require_matching_bundle(job: JobSettings, bundle: Bundle) -> None:
    """Raise JobError if a bundle differs from the job in the settings that the bundle records.

    The check compares the network of [model], its input, the names of [[donors]], and the labels. A key that the job
    leaves out matches any value.
    """
    bundle_network = dict(bundle.meta.get("network", {}))
    bundle_input = bundle.meta.get("input") or bundle_network.pop("input", None) or {}
    network = _network_keys(job.model)
    bundle_tiers = {tier: _network_keys(meta["network"]) for tier, meta in bundle.meta.get("tiers", {}).items()}
    job_input = job.input or job.model.get("input") or {}
    differing = []
    tiers = {tier: _network_keys(table) for tier, table in tier_models(job.model).items()}
    if network and (network, tiers) != (_network_keys(bundle_network), bundle_tiers):
        differing.append("[model]")
    if any(_lists_from_tuples(bundle_input.get(key)) != _lists_from_tuples(value) for key, value in job_input.items()):
        differing.append("[input]")
    if job.donors and [donor.get("name") for donor in job.donors] != list(bundle.meta.get("donors", {})):
        differing.append("[[donors]]")
    has_labels = bool(job.labels) and "labels" in bundle.meta
    if has_labels and (mismatch := _find_label_mismatch(job.labels, bundle.meta["labels"])):
        differing.append(mismatch)
    if differing:
        raise JobError(
            f"the bundle was prepared for another job ({' and '.join(differing)} differ): prepare it again with "
            "`fedquilt prepare`"
        )


def _find_label_mismatch(job_labels: Sequence[str], bundle_labels: Sequence[str]) -> str | None:
    for number, (job_label, bundle_label) in enumerate(itertools.zip_longest(job_labels, bundle_labels)):
        if job_label != bundle_label:
            texts = ["none" if label is None else repr(label) for label in (job_label, bundle_label)]
            return f"labels (label {number} is {texts[0]} in the job and {texts[1]} in the bundle)"
    return None


def _lists_from_tuples(value: Any) -> Any:
    # JSON turns tuples into lists
    return [_lists_from_tuples(item) for item in value] if isinstance(value, list | tuple) else value
