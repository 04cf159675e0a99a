"""Report of a GPU check as JSON and as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from fedquilt.console import table
from fedquilt.core import JobError, StoreError
from fedquilt.host import disk

VERSION: Final = 1
MOST_BYTES: Final = 1 << 20  # of a report that is read
Verdict: TypeAlias = Literal["ok", "skipped", "refused", "warning", "error"]
EXIT: Final[dict[Verdict, int]] = {"ok": 0, "skipped": 10, "refused": 10, "warning": 10, "error": 11}


class PartResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Verdict of one part. `sentence` has the reason of any verdict but "ok"."""

    verdict: Verdict
    sentence: str


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Machine and versions. `unknown` has the reason of each field that is None."""

    board: str
    memory_bytes: int
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    shared_memory: bool | None = None
    compute_capability: str | None = None
    driver: str | None = None
    cuda: str | None = None  # that torch was built with
    cudnn: int | None = None
    torch: str | None = None
    onnxruntime: str | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    power_mode: str | None = None  # nvpmodel's
    python: str
    kernel: str
    unknown: dict[str, str] = {}


class ProviderRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    library: Literal["torch", "onnxruntime"]
    device: str
    runs: bool
    nodes: dict[str, int] = {}  # of the graph, by the provider that ran them
    largest_difference: float | None = None  # from the CPU's result, relative to its largest value
    reason: str = ""


class MemoryRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Predicted and measured peak above the idle engine, on processor and GPU together."""

    work: str
    batch: int
    runs_on: str
    predicted_bytes: int | None
    measured_bytes: int | None
    ratio: float | None  # measured over predicted


class ThroughputRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rates of the engine and of a bare loop in turn."""

    work: str
    runs_on: str
    unit: Literal["steps/s", "images/s"]
    engine_rates: tuple[float, ...]
    bare_rates: tuple[float, ...]
    ratio: float  # median of the pairs: the engine's rate over the bare loop's


class Correctness(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    steps: int
    runs_on: str
    cpu_difference: float | None  # largest of the update, relative to the CPU's largest change
    repeat_difference: float  # largest of two runs on one device; 0: bit-identical
    refusal_code: str = ""  # of the task that exceeds the memory
    refusal: str = ""
    next_task: str = ""  # code of the task after it


class Clock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    kind: str
    now_hz: float | None
    high_hz: float | None
    settings: int  # frequencies that can be set here
    measured_hz: tuple[float, ...] = ()  # read back at the lowest and highest point, with --set-clocks


class MeterRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    meter: str
    idle_w: float | None = None
    load_w: float | None = None
    load_j: float | None = None
    load_error_j: float | None = None
    load_s: float | None = None
    reason: str = ""


class GpuReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    version: Literal[1] = 1
    fedquilt: str
    began: str  # UTC
    took_s: float
    busy_cpu_share: float | None  # of other processes during throughput
    busy_gpu_share: float | None  # before this process used the GPU
    environment: Environment
    parts: dict[str, PartResult]
    providers: tuple[ProviderRun, ...] = ()
    memory: tuple[MemoryRun, ...] = ()
    throughput: tuple[ThroughputRun, ...] = ()
    correctness: Correctness | None = None
    clocks: tuple[Clock, ...] = ()
    meters: tuple[MeterRun, ...] = ()


def exit_code(report: GpuReport) -> int:
    return max((EXIT[part.verdict] for part in report.parts.values()), default=0)


def write_report(report: GpuReport, path: Path) -> None:
    disk.write_output(path, msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")


def read_report(path: Path) -> GpuReport:
    """Read a report.

    Raises:
        StoreError: If the file cannot be read.
        JobError: If the file is no report of this version.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; name a report of check-gpu") from None
    if len(data) > MOST_BYTES:
        raise JobError(f"{path} has more than {MOST_BYTES} bytes, too many for a report of check-gpu")
    try:
        return msgspec.json.decode(data, type=GpuReport)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        hint = f"write a new one with `fedquilt board check-gpu --out {path.name}`"
        raise JobError(f"{path} is no report of check-gpu, version {VERSION} ({error}): {hint}") from None


# -- tables ---------------------------------------------------------------------------------------


def format_report(report: GpuReport) -> list[str]:
    """Format the report as tables of at most 80 columns, or of a terminal's width."""
    colours = {"ok": "green", "error": "red", "warning": "yellow", "refused": "yellow"}
    said = [*table.format_table(_facts(report), "<~"), "", *table.format_table(_verdicts(report), "<<~", None, colours)]
    for rows in figure_tables(report):
        said += ["", *table.format_table(rows, "<<>")]
    return said


def format_markdown(report: GpuReport) -> list[str]:
    """Format the report as Markdown tables, for the documentation."""
    said: list[str] = []
    facts, verdicts = [("machine", ""), *_facts(report)], [("part", "verdict", "result"), *_verdicts(report)]
    for head, *rows in (facts, verdicts, *figure_tables(report)):
        lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
        said += ["", *lines] if said else lines
    return said


def _facts(report: GpuReport) -> list[tuple[str, ...]]:
    env = report.environment
    names = ("gpu", "compute_capability", "driver", "cuda", "torch", "onnxruntime", "power_limit_w", "power_mode")
    return [("board", env.board), *((name.replace("_", " "), _text(getattr(env, name))) for name in names)]


def _verdicts(report: GpuReport) -> list[tuple[str, ...]]:
    return [(name, part.verdict, part.sentence) for name, part in report.parts.items()]


def figure_tables(report: GpuReport) -> list[list[tuple[str, ...]]]:
    """Return memory, throughput and energy as tables with heads, without empty ones."""
    memory: list[tuple[str, ...]] = [("memory", "on", "predicted MB", "measured MB", "ratio")]
    memory += [
        (f"{one.work}, batch {one.batch}", one.runs_on, _mb(one.predicted_bytes), _mb(one.measured_bytes),
         _text(one.ratio))
        for one in report.memory
    ]  # fmt: skip
    rates: list[tuple[str, ...]] = [("throughput", "on", "engine", "bare loop", "unit", "ratio")]
    rates += [
        (one.work, one.runs_on, _text(median(one.engine_rates)), _text(median(one.bare_rates)), one.unit,
         _text(one.ratio))
        for one in report.throughput
    ]  # fmt: skip
    meters: list[tuple[str, ...]] = [("meter", "idle W", "load W", "load J", "+- J")]
    meters += [
        (one.meter, *map(_text, (one.idle_w, one.load_w, one.load_j, one.load_error_j))) for one in report.meters
    ]
    return [rows for rows in (memory, rates, meters) if len(rows) > 1]


def median(values: tuple[float, ...]) -> float:
    ordered = sorted(values)
    return (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _mb(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:.1f}"
