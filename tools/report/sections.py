"""The parts of a run's page as values for its template; a part without content is None or empty."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from fedquilt import metrics, units
from fedquilt.coordinator.facts import Answered, AnyFact, Asked, Closed, Rounds, Surveyed, apply
from fedquilt.coordinator.plan import Plan
from fedquilt.coordinator.views import costs
from fedquilt.coordinator.views.costs import Ledger
from fedquilt.coordinator.views.log import Teller
from fedquilt.tools.report import matrix, plots
from fedquilt.tools.report.found import Found
from fedquilt.tools.report.page import Section, Table, drawn

T = TypeVar("T")

MOST_DEVICES = 40  # bars in one plot
MOST_ROUNDS = 40  # likewise
MOST_LINES = 1000  # of the log


def tiles(found: Found) -> list[tuple[str, str]]:
    """Figures at the top of the page: (value, caption)."""
    whole, tiles = found.account.whole, []
    if found.scores:
        tiles.append((_value(found.scores[-1].metric, found.scores[-1].value), f"{_title(found)} on the test set"))
    if found.checks and (last := found.checks[-1].personal) is not None:
        tiles.append((_value(last.metric, last.weighted), f"{_title(found)} on held-out shares"))
        tiles.append((_value(last.metric, last.worst_decile), "worst tenth of the devices"))
    done = found.points[-1] if found.points else None
    tiles.append((str(done.rounds if done else 0), "rounds"))
    tiles.append((str(len(found.account.devices)), "devices"))
    if done is not None:
        tiles.append((seconds(done.clock_s), "by the coordinator's clock"))
        tiles.append((seconds(done.real_s), "by this machine's clock"))
    tiles.append((units.size(whole.down_bytes + whole.up_bytes), "down and up"))
    if whole.energy_j is not None:
        some = "" if whole.metered == whole.tasks else f", {whole.metered} of {whole.tasks} tasks"
        tiles.append((f"{costs.short(whole.energy_j)} J", f"of the boards{some}"))
    return tiles


def accuracy(found: Found) -> Section:
    """Over rounds, time, bytes and energy; a single evaluation is a sentence."""
    if not found.checks and not found.scores:
        how = f"fedquilt evaluate {found.row.id} --home {found.home}"
        return Section([f"Not measured: the job has [check] every = 0. `{how}` measures it on the test set."])
    if len({*(point.rounds for point in found.checks), *(score.rounds for score in found.scores)}) < 2:
        return Section(_last(found), (), *_personal(found))
    at = {point.rounds: point for point in found.points}
    axes = [("rounds", "by round", {point.rounds: float(point.rounds) for point in found.points})]
    for title, label, taken in (
        ("by time", "coordinator's clock", {r: point.clock_s for r, point in at.items()}),
        ("by the boards' time", "slowest board of each round", _known({r: p.boards_s for r, p in at.items()})),
    ):
        scale, name = _seconds_unit(max(taken.values(), default=0.0))
        if any(taken.values()):
            axes.append((f"{label}, {name}", title, {r: value / scale for r, value in taken.items()}))
    moved = {r: float(p.down_bytes + p.up_bytes) for r, p in at.items()}
    scale, prefix = units.unit(max(moved.values(), default=0.0))
    axes.append((f"{prefix}B, down and up", "by bytes", {r: value / scale for r, value in moved.items()}))
    joules = _known({r: p.energy_j for r, p in at.items()})
    if any(joules.values()):
        scale, prefix = units.unit(max(joules.values()))
        axes.append((f"{prefix}J of the boards, gross", "by energy", {r: v / scale for r, v in joules.items()}))
    metric = _metric(found)
    heading = metric.title[0].upper() + metric.title[1:]
    unit, most = (", %", 100.0) if metric.share else ("", math.inf)
    over = (
        plots.lines(_lines(found, places), f"{heading} {title}", label, metric.title + unit, most=most)
        for label, title, places in axes
    )
    return Section((), drawn(*over), *_personal(found))


def _last(found: Found) -> list[str]:
    """One evaluation as a sentence."""
    return [
        f"After {score.rounds} rounds: {_value(score.metric, score.value)} of {score.examples} examples of the test "
        "set."
        for score in found.scores
    ]


def _lines(found: Found, places: Mapping[int, float]) -> list[plots.Line]:
    """Each kind of accuracy, over what `places` tells of a number of rounds."""
    kinds: dict[str, dict[int, float]] = {
        "test set": {score.rounds: score.value for score in found.scores},
        "held-out shares": {},
        "worst tenth": {},
    }
    for point in found.checks:
        assert point.personal is not None
        kinds["held-out shares"][point.rounds] = point.personal.weighted
        kinds["worst tenth"][point.rounds] = point.personal.worst_decile
    lines, scale = [], metrics.scale(_metric(found))
    for name, values in kinds.items():
        known = sorted(number for number in values if number in places)
        if known:
            lines.append(plots.Line(name, [places[n] for n in known], [scale * values[n] for n in known]))
    return lines


def _personal(found: Found) -> tuple[list[str], Table | None]:
    """A sentence and a table of evaluations on the devices' held-out shares; nothing without any."""
    checks = found.checks
    if not checks:
        return [], None
    last = checks[-1].personal
    assert last is not None
    rows = [
        [
            str(point.rounds),
            *(_value(own.metric, value) for value in (own.weighted, own.mean, own.worst_decile, own.deviation)),
            str(own.count),
        ]
        for point in (checks if len(checks) <= 6 else [*checks[:2], *checks[-4:]])
        if (own := point.personal) is not None
    ]
    head = ["after rounds", "weighted by examples", "mean of devices", "worst tenth", "spread", "devices"]
    note = f"Held-out shares: the devices' own examples that are not trained on; {last.count} devices reported."
    return [note], Table(head, rows)


def time(found: Found) -> Section | None:
    """Where each round's time went, seen from its devices."""
    splits = found.splits
    if not splits:
        return None
    chosen = _spread(splits, MOST_ROUNDS)
    lasted_s = sum(split.lasted_s for split in splits)
    scale, prefix = units.unit(max(split.lasted_s for split in splits)) if lasted_s < 100 else (1.0, "")
    bars = [
        plots.Bar(_round(found, split.round), (split.compute_s / scale, split.transfer_s / scale, split.wait_s / scale))
        for split in chosen
    ]
    shares = {
        name: 100 * sum(getattr(split, f"{name}_s") for split in splits) / lasted_s if lasted_s else 0.0
        for name in ("compute", "transfer", "wait")
    }
    some = "" if len(chosen) == len(splits) else f" {len(chosen)} of {len(splits)} rounds are drawn."
    note = (
        f"Of a round, a device that answers spends on average {shares['compute']:.0f} % at its task, "
        f"{shares['transfer']:.0f} % fetching, starting and sending, {shares['wait']:.0f} % waiting for other "
        f"devices and for the round to begin.{some}"
    )
    points = found.points
    clocks = []
    if points:
        last = points[-1]
        told = f"The coordinator's clock counted {seconds(last.clock_s)}, this machine's {seconds(last.real_s)}"
        if last.boards_s is not None:
            told += f"; the slowest boards of all rounds report {seconds(last.boards_s)} together"
        clocks.append(
            f"{told}. Simulated boards report what their profiles predict; what their tasks really took here counts as "
            "fetching and sending. On virtual time (`fedquilt fleet --link memory`) the coordinator's clock is virtual."
        )
    names = ("task", "down, start and up", "waiting")
    plot = plots.bars(bars, "Time per round, mean over its devices", f"{prefix}s", names)
    return Section([note], drawn(plot), clocks)


def devices(found: Found) -> Section | None:
    """Cost of each device: energy and memory as plots, all of it as a table."""
    known = found.account.devices
    if not known:
        return None
    own: dict[str, float] = {}
    for point in found.checks:
        own |= point.personal.devices if point.personal is not None else {}
    rows = [
        [name, *_device(of), *([_value(_metric(found).name, own[name]) if name in own else "-"] if own else [])]
        for name, of in known.items()
    ]
    head = ["device", "tasks", "refused", "s per task", "J", "J above idle", "peak memory", "down", "up"]
    head += [f"last {_title(found)}"] if own else []
    shown = dict(sorted(known.items(), key=lambda each: -(each[1].energy_j or 0.0))[:MOST_DEVICES])
    figures = []
    if any(of.energy_j is not None for of in shown.values()):
        scale, prefix = units.unit(max(of.energy_j or 0.0 for of in shown.values()))
        joules = [plots.Bar(name, [each and each / scale for each in _energy(of)]) for name, of in shown.items()]
        kinds = ("idle", "above idle", "idle part unknown")
        used = 3 if any(bar.parts[2] is not None for bar in joules) else 2
        joules = [plots.Bar(bar.name, bar.parts[:used]) for bar in joules]
        figures.append(plots.bars(joules, "Energy of each device", f"{prefix}J", kinds[:used]))
    if any(of.peak_bytes is not None for of in shown.values()):
        peaks = [plots.Bar(name, _peak(of)) for name, of in shown.items()]
        figures.append(plots.bars(peaks, "Highest memory of a task", "MB", ("runtime", "task")))
    notes = [] if len(shown) == len(known) else [f"Drawn: {len(shown)} of {len(known)} devices."]
    sources = sorted({of.energy_source for of in known.values() if of.energy_source})
    notes += [f"Energy measured by: {'; '.join(sources)}."] if sources else []
    return Section((), drawn(*figures), notes, Table(head, rows))


def _device(of: Ledger) -> list[str]:
    return [
        str(of.tasks),
        str(of.declined),
        f"{of.wall_s / of.tasks:.3g}" if of.tasks else "-",
        "-" if of.energy_j is None else costs.short(of.energy_j),
        "-" if of.net_j is None else costs.short(of.net_j),
        "-" if of.peak_bytes is None else units.size(of.peak_bytes),
        units.size(of.down_bytes),
        units.size(of.up_bytes),
    ]


def _energy(of: Ledger) -> tuple[float | None, float | None, float | None]:
    if of.energy_j is None or of.net_j is None:
        return (None, None, of.energy_j)
    return (of.energy_j - of.net_j, of.net_j, None)


def _peak(of: Ledger) -> tuple[float | None, float | None]:
    """Memory in MB: of the process before its task, and of the task itself; None: unknown."""
    if of.peak_bytes is None:
        return (None, None)
    base = min(of.base_bytes or 0, of.peak_bytes)
    return (base / 1e6, (of.peak_bytes - base) / 1e6)


def bytes(found: Found) -> Section | None:
    """Bytes of each round."""
    per_round = found.account.rounds
    if not per_round:
        return None
    scale, prefix = units.unit(max(of.down_bytes + of.up_bytes for of in per_round.values()))
    chosen = _spread(list(per_round.items()), MOST_ROUNDS)
    bars = [plots.Bar(_round(found, n), (of.down_bytes / scale, of.up_bytes / scale)) for n, of in chosen]
    whole = found.account.whole
    down, up = units.size(whole.down_bytes), units.size(whole.up_bytes)
    note = f"In all {down} down and {up} up: tensors and models, without the protocol's own messages."
    return Section([note], drawn(plots.bars(bars, "Bytes per round, all devices", f"{prefix}B", ("down", "up"))))


def reasons(found: Found) -> Table:
    """How often each device did not contribute, and why."""
    counted = Counter(
        (name, matrix.reason(part))
        for devices in found.parts.values()
        for name, part in devices.items()
        if part.code not in ("answered", "drawn", "asked")
    )
    rows = [[name, text, str(count)] for (name, text), count in counted.most_common(20)]
    return Table(["device", "why not", "rounds"], rows, ["why not"])


class Told(NamedTuple):
    """The log in sentences."""

    brief: list[str]  # without each answer; empty: nothing has happened yet
    whole: list[str]
    energy: list[str]


def log(found: Found) -> Told:
    """Events of the run: in brief, and fact by fact."""
    brief, whole, teller = [], [], Teller()
    state = Rounds(Plan.of(found.row.job))
    for at, fact in found.facts:
        state = apply(state, fact, 0.0)
        first, *more = teller.tell(fact, state)
        lines = [f"{at - found.facts[0][0]:9.1f} s  {first}", *(f"{'':13}{line}" for line in more)]
        whole += lines
        if not isinstance(fact, Surveyed | Asked) and _news(fact):
            brief += lines
    cut = [f"... {len(whole) - MOST_LINES} more lines: fedquilt logs {found.row.id}"]
    detail = whole if len(whole) <= MOST_LINES else [*whole[:MOST_LINES], *cut]
    told = brief if len(brief) <= MOST_LINES else [*brief[:MOST_LINES], *cut]
    return Told(told, detail, costs.lines(found.account))


def _news(fact: AnyFact) -> bool:
    """Whether a fact belongs to the brief log: single answers do not."""
    return not isinstance(fact, Answered | Closed)


def toml(job: Any) -> str:
    """A job as TOML, without what is left at its default."""
    import tomli_w

    return tomli_w.dumps(_changed(job))


def _changed(table: Any) -> dict[str, Any]:
    """The fields of a struct that are not at their default; structs in it likewise."""
    found = {}
    for field in msgspec.structs.fields(table):
        value = getattr(table, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default and value is not None:
            inner = _changed(value) if isinstance(value, msgspec.Struct) else _plain(msgspec.to_builtins(value))
            found[field.encode_name] = inner
    return found


def _plain(value: Any) -> Any:
    """Without None, which TOML has no word for."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    return [_plain(each) for each in value] if isinstance(value, list) else value


# -- figures --------------------------------------------------------------------------------------


def _spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many, evenly from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _round(found: Found, number: int) -> str:
    """Name of a round; after the last one there may be an evaluation."""
    done = found.points[-1].rounds if found.points else number + 1
    return f"round {number}" if number < done else "evaluation"


def _metric(found: Found) -> metrics.Metric:
    """The run's main metric."""
    told = [score.metric for score in found.scores]
    told += [point.personal.metric for point in found.checks if point.personal is not None]
    return metrics.KNOWN[told[0] if told else "accuracy"]


def _title(found: Found) -> str:
    return _metric(found).title


def _value(metric: str, value: float) -> str:
    return metrics.shown(metrics.KNOWN[metric], value, 1)


def seconds(value: float) -> str:
    """Duration with a suitable unit."""
    scale, name = _seconds_unit(value)
    return f"{value / scale:.3g} {name}" if value / scale < 100 else f"{value / scale:.0f} {name}"


def _seconds_unit(largest: float) -> tuple[float, str]:
    if 0 < largest < 1:
        scale, prefix = units.unit(largest)
        return scale, f"{prefix}s"
    return next(((s, n) for s, n in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")) if largest >= 3 * s), (1.0, "s"))


def _known(values: Mapping[int, float | None]) -> dict[int, float]:
    return {number: value for number, value in values.items() if value is not None}
