"""Demo story of a fleet: drift, a rollout of a new model and a rollback (`demo --story`).

Every step is a fedquilt command in a process, and every number is read from the coordinator's home and the answers of
the model runners. Only the boards are simulated: times and joules follow their profiles.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import textwrap
import time
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from fedquilt.console import progress, table, units
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.fleet.telemetry_store import TelemetryStore
from fedquilt.coordinator.rounds.events import UpdateAccepted
from fedquilt.coordinator.rounds.rollout import SETTLED
from fedquilt.coordinator.storage.rollout_log import StoredRollout
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views.run_summary import summarise_events
from fedquilt.core import Examples, JobError
from fedquilt.formats import toml
from fedquilt.host import disk
from fedquilt.tools.artefacts import export
from fedquilt.tools.broker import EmbeddedBroker
from fedquilt.tools.lab.demo import HERE, drift_scenario
from fedquilt.tools.lab.demo import report as demo_report
from fedquilt.tools.lab.demo.console import StoryPrinter, format_bold
from fedquilt.tools.lab.demo.report import StreamSummary, TimelineEntry
from fedquilt.tools.lab.demo.request_streams import RequestStreams, find_address
from fedquilt.tools.report import plots
from fedquilt.tools.simulation import agents, child_processes

BOARDS: Final = 8
TICK_S: Final = 0.4  # between two looks at how far it is
LIMIT_S: Final = 900.0  # for a step, also on a busy machine
TELEMETRY_S: Final = 2.0
DRIFTED: Final = 0.3  # told by every board, before something is done about it
AFTER: Final = 400  # answers of each board to changed inputs, before something is done about them
LOOK_S: Final = 0.2
CANARY: Final = ("--phases", "12%", "100%")
JOB, DATA, HOME, BAD = "digits", "digits.npz", "runs", "bright-only.onnx"


def run_story(out: Path, format: str = "text", show: bool = False, boards: int = BOARDS) -> int:
    """Run the story and write its page into `out`. Return 0.

    Args:
        out: Output folder, created if missing.
        format: "text", or "json" for the result as one line.
        show: Whether to open the page in a browser.
        boards: Number of devices.

    Raises:
        JobError: If a step has an unexpected result, or a process ended.
    """
    folder = (out / time.strftime("story-%Y%m%d-%H%M%S")).resolve()
    began, teller = time.time(), StoryPrinter(format == "text")
    with contextlib.ExitStack() as stack, progress.call_periodically(teller.show_status, TICK_S):
        fleet = _StoryFleet.start_all(stack, folder, boards)
        teller.print_lines(*_format_introduction(fleet))
        found, stream, moments = _StorySteps(fleet, teller, began).run_steps()
    report = out / "story.html"
    result = msgspec.json.encode({**msgspec.to_builtins(found), "report": str(report)}).decode()
    drawn = demo_report.plot_story(found, stream, moments)
    disk.write_output(report, demo_report.render_page(found, drawn, moments, stream.began))
    disk.write_output(out / "story.svg", plots.render_file(*drawn))
    disk.write_output(out / "story.json", result + "\n")
    if format != "text":
        print(result)
    else:
        teller.print_lines("", *_format_results(found))
        teller.print_lines(f"page, with plots (--open shows it): {report}")
    if show:
        webbrowser.open(report.resolve().as_uri())
    return 0


@dataclass(frozen=True)
class _StoryFleet:
    """Boards, their coordinator and what lies in the story's folder."""

    folder: Path
    devices: tuple[str, ...]
    store: Store
    processes: dict[str, subprocess.Popen[bytes]]  # by name, those that go on to the end
    train: Examples
    test: Examples

    @property
    def home(self) -> Path:
        return self.folder / HOME

    def model_folder(self, device: str) -> Path:
        return self.folder / "boards" / device / "models"

    def log_path(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    @classmethod
    def start_all(cls, stack: contextlib.ExitStack, folder: Path, boards: int) -> _StoryFleet:
        (folder / "logs").mkdir(parents=True)
        held = np.load(HERE / DATA)
        train, test = (Examples(held[f"x_{split}"], held[f"y_{split}"]) for split in ("train", "test"))
        _write_images(folder / DATA, train, test)
        table = toml.read_toml(HERE / "job.toml")
        table["params"]["expansions"] = 0  # a joint head on the donors' blocks: nothing is stitched, nothing trained
        table["fleet"]["devices"] = table["cohort"]["start_devices"] = boards
        (folder / f"{JOB}.toml").write_text(toml.format_toml(table))
        (folder / f"{JOB}.bundle").symlink_to(HERE / "bundle")
        url = stack.enter_context(EmbeddedBroker()).url
        plan = agents.FleetPlan(jobs.load_job(folder / f"{JOB}.toml"), HERE / "bundle", folder / HOME)
        tables = [
            {**each, "home": str(folder / "boards" / each["device"]), "telemetry_s": TELEMETRY_S}
            for each in plan.make_agent_tables()
        ]
        store = stack.enter_context(Store(folder / HOME))
        serve = child_processes.ChildCommand(
            ["serve", "--home", HOME, "--broker", url], folder / "logs/serve.log", folder
        )
        running = stack.enter_context(child_processes.start_processes({"serve": serve}))
        running |= stack.enter_context(agents.start_agents(tables, {"url": url}))
        return cls(folder, tuple(each["device"] for each in tables), store, running, train, test)


def _write_images(path: Path, train: Examples, test: Examples) -> None:
    # atomically, because boards read the file at any time
    file = io.BytesIO()
    np.savez_compressed(file, x_train=train.x, y_train=train.y, x_test=test.x, y_test=test.y)
    disk.REAL.write_atomically(path, file.getvalue(), durable=False)


class _StorySteps:
    """The steps of the story, one after the other."""

    def __init__(self, fleet: _StoryFleet, teller: StoryPrinter, began: float) -> None:
        self._fleet, self._teller, self._began = fleet, teller, began
        self._moments: list[TimelineEntry] = []

    def run_steps(self) -> tuple[demo_report.StoryReport, StreamSummary, list[TimelineEntry]]:
        fleet, count = self._fleet, len(self._fleet.devices)
        self._wait_until(fleet.store.is_served, "the coordinator starts")  # else `run` would be one itself
        first_run = self._run_job("boards make a network")
        first = self._deploy_model([JOB], ["--soak", "1s"], "done")
        with contextlib.ExitStack() as stack:
            streams = self._start_runners(stack)
            self._wait_until(
                lambda: self._is_stable(streams, first), "digits come in, and runners learn what is normal"
            )
            self._report_event(f"{_format_accuracy(streams, self._began)} of the answers are right, and no drift")
            changed_s = self._change_inputs(streams)
            bad = self._deploy_bad_model(first_run)
            _write_images(fleet.folder / DATA, *self._changed_images())
            self._report_event(f"boards have {len(fleet.train)} labelled images of what they see now")
            last_run = self._run_job("boards make another network")
            last = self._deploy_model([JOB], ["--min-gain", "5pt", "--soak", "5s"], "done", "new model")
            streams.set_pace(fast=True)
            self._wait_until(
                lambda: self._is_stable(streams, last), f"{count} runners learn what is normal with the new model"
            )
            since = min(each.at for each in streams.answers if each.model == demo_report.model_sha256(last))
            self._report_event(
                f"{_format_accuracy(streams, since, demo_report.model_sha256(last))} of the answers are "
                "right, and no drift"
            )
        stream = StreamSummary(self._began, changed_s, time.time(), streams.answers, streams.said, streams.failed)
        rollouts = [each.state.id for each in (first, bad, last)]
        return (
            demo_report.build_report(fleet.home, fleet.store, [first_run, last_run], rollouts, stream),
            stream,
            self._moments,
        )

    # -- steps --

    def _run_job(self, what: str) -> str:
        before = {row.id for row in self._fleet.store.readable_jobs()}

        def describe_progress() -> str:
            begun = [row.id for row in self._fleet.store.readable_jobs() if row.id not in before]
            facts = self._fleet.store.read_events(begun[-1]) if begun else ()
            return f"{what}: {sum(isinstance(fact, UpdateAccepted) for _, _, fact in facts)} answers so far"

        self._run_command(["run", f"{JOB}.toml", "--home", HOME], describe_progress)
        row = self._fleet.store.find_job(JOB)
        if row.status != "done":
            raise JobError(f"{row.id} is {row.status}: see {self._fleet.log_path('run')}")
        whole = summarise_events(row.job, self._fleet.store.read_events(row.id)).total
        joules = "" if whole.energy_j is None else f", {whole.energy_j:.1f} J"
        size = units.format_bytes(whole.down_bytes + whole.up_bytes)
        self._report_event(f"a network from {whole.examples:.0f} images{joules}, {size}, nothing trained")
        return row.id

    def _deploy_model(self, what: Sequence[str], how: Sequence[str], end: str, short: str = "") -> StoredRollout:
        self._run_command(
            ["rollout", "model", *what, "--home", HOME, *CANARY, *how], "a model is handed over", short=short
        )
        find = self._fleet.store.rollouts.find_rollout
        id = find().state.id

        def has_ended() -> bool:
            kept = find(id)
            counts = ", ".join(f"{number} {phase or 'asked'}" for phase, number in kept.state.count_outcomes().items())
            self._teller.now = f"boards with {kept.state.plan.name}: {counts or 'none yet'}"
            settled = all(kept.state.device_phase(device) in SETTLED for device in kept.state.offered)
            return not kept.state.is_under_way and settled

        self._wait_until(has_ended)
        kept = find(id)
        if kept.state.status != end:
            raise JobError(f"{id} was to be {end} and is {kept.state.status}: {kept.state.reason}")
        if end == "done":
            on = kept.state.count_outcomes().get("committed", 0)
            self._report_event(f"checked by each, and in use on {on} of {len(self._fleet.devices)} boards")
        return kept

    def _start_runners(self, stack: contextlib.ExitStack) -> RequestStreams:
        fleet = self._fleet
        words = {each: ["model", "serve", f"boards/{each}/models", "--listen", "127.0.0.1:0"] for each in fleet.devices}
        note = f"and one for each of the other {len(fleet.devices) - 1} boards"
        self._report_command(words[fleet.devices[0]], note)
        logs = {device: fleet.log_path(f"runner-{device}") for device in fleet.devices}
        wanted = {each: child_processes.ChildCommand(words[each], logs[each], fleet.folder) for each in words}
        running = stack.enter_context(child_processes.start_processes(wanted))
        self._fleet.processes.update({f"runner-{device}": process for device, process in running.items()})

        def have_started() -> bool:
            there = sum(find_address(log) is not None for log in logs.values())
            self._teller.now = f"the runners start: {there} of {len(logs)} are there"
            return there == len(logs)

        self._wait_until(have_started)
        urls = {device: find_address(log) or "" for device, log in logs.items()}
        streams = RequestStreams(urls, {device: fleet.model_folder(device) for device in urls}, fleet.test)
        stack.enter_context(streams.send_in_background())
        return streams

    def _change_inputs(self, streams: RequestStreams) -> float:
        devices, home = self._fleet.devices, self._fleet.home
        streams.set_images(self._changed_images()[1])
        at = time.time()
        self._teller.print_lines("")
        said = f"the cameras are knocked askew, and it gets dark: turned by {drift_scenario.DEGREES:g} degrees, "
        self._report_event(f"{said}{drift_scenario.LIGHT:.0%} of the light, noisier", "inputs change")

        def read_drifts() -> list[float]:
            with TelemetryStore(home) as boards:
                return [each.drift or 0.0 for each in boards.latest_readings(time.time()).values()]

        def is_drift_reported() -> bool:
            enough = all(streams.count_answers(device, at) >= AFTER for device in devices)
            return enough and sum(drift >= DRIFTED for drift in read_drifts()) == len(devices)

        self._wait_until(is_drift_reported, "the runners answer what they have never seen")
        found = read_drifts()
        self._report_event(
            f"{_format_accuracy(streams, at)} of the answers are right; drift {min(found):.2f} to {max(found):.2f}"
        )
        streams.set_pace(fast=False)
        shown = self._run_command(["devices", devices[0], "--home", HOME], "the coordinator is asked")
        self._teller.print_lines(*(line for line in shown if line.strip()))
        return at

    def _deploy_bad_model(self, run: str) -> StoredRollout:
        fleet = self._fleet
        (fleet.folder / BAD).write_bytes(
            drift_scenario.make_bright_only_model(export.encode_for_devices(fleet.store, run)[0])
        )
        self._teller.print_lines("")
        self._report_event(
            "somebody deploys a network that is blind in the dark; on the boards' old images its check finds little"
        )
        kept = self._deploy_model([BAD], ["--min-gain", "-15pt", "--soak", "15s"], "aborted", "bad model")
        for device, seconds in demo_report.seconds_in_use(fleet.store, kept.state.id).items():
            self._report_event(f"{device} had it for {seconds:.1f} s, and went back by itself:")
        why, indent = demo_report.rollback_reason(kept), " " * 10
        self._teller.print_lines(
            *textwrap.wrap(why, table.line_width(), initial_indent=indent, subsequent_indent=indent)
        )
        rest = len(fleet.devices) - len(kept.state.offered)
        self._report_event(f"the rollout is aborted; {rest} of {len(fleet.devices)} boards were never offered it")
        return kept

    def _changed_images(self) -> tuple[Examples, Examples]:
        train, test = self._fleet.train, self._fleet.test
        return Examples(drift_scenario.degrade_images(train.x, 0), train.y), Examples(
            drift_scenario.degrade_images(test.x, 1), test.y
        )

    def _is_stable(self, streams: RequestStreams, kept: StoredRollout) -> bool:
        said, blob = streams.latest_samples(), demo_report.model_sha256(kept)
        return all(
            (own := said.get(device)) is not None
            and own.model == blob
            and own.accuracy is not None
            and own.drift is not None
            and own.drift < DRIFTED
            for device in self._fleet.devices
        )

    # -- what all steps do --

    def _report_event(self, said: str, short: str = "") -> None:
        self._moments.append(TimelineEntry(time.time(), said, short=short))
        self._teller.print_event(said)

    def _report_command(self, words: Sequence[str], note: str = "", short: str = "") -> None:
        self._moments.append(TimelineEntry(time.time(), note, f"fedquilt {' '.join(words)}", short))
        self._teller.print_command(["$ fedquilt", *words], note)

    def _run_command(self, words: Sequence[str], what: str | Callable[[], str], short: str = "") -> list[str]:
        self._report_command(words, short=short)
        log = self._fleet.log_path(f"{words[0]}-{len(self._moments)}")
        process = child_processes.start_process(child_processes.ChildCommand(words, log, self._fleet.folder))
        try:
            self._wait_until(lambda: process.poll() is not None, what)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode:
            raise JobError(
                f"`fedquilt {' '.join(words)}` ended with {process.returncode}: {child_processes.read_last_line(log)}"
            )
        return log.read_text().splitlines()

    def _wait_until(self, condition: Callable[[], bool], what: str | Callable[[], str] = "") -> None:
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            self._teller.now = (what if isinstance(what, str) else what()) or self._teller.now
            for name, process in self._fleet.processes.items():
                if process.poll() is not None:
                    raise JobError(f"{name} has ended with {process.returncode}: see {self._fleet.folder}")
            if time.monotonic() > end_s:
                raise JobError(
                    f"not within {units.format_duration(LIMIT_S)}: {self._teller.now}: see {self._fleet.folder}"
                )
            time.sleep(LOOK_S)


def _format_accuracy(streams: RequestStreams, since: float, model: str = "") -> str:
    found = (each for each in list(streams.answers) if each.at >= since and model in ("", each.model))
    return f"{demo_report.share_correct(found) or 0.0:.1%}"


def _format_introduction(fleet: _StoryFleet) -> list[str]:
    text = (
        f"{len(fleet.devices)} simulated boards, each with an agent and a model runner, have {len(fleet.train)} "
        "labelled digits. Networks that know MNIST get a new head, which is solved from sums that the boards send: "
        "no training, and no image leaves a board."
    )
    title = "From drift to fixed: a fleet serves a model, and its inputs change."
    return [format_bold(title), *textwrap.wrap(text, table.line_width())]


def _format_results(found: demo_report.StoryReport) -> list[str]:
    def format_percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    rows = [("right answers, %", "at first", "changed", "now", "drift", "had the bad model")]
    for board in found.boards:
        drift = "-" if board.drift is None else f"{board.drift:.2f}"
        bad = "never" if board.bad_s is None else f"{board.bad_s:.1f} s"
        rows.append(
            (
                board.name,
                format_percent(board.before),
                format_percent(board.dropped),
                format_percent(board.after),
                drift,
                bad,
            )
        )
    said = [line for each in demo_report.format_sentences(found) for line in textwrap.wrap(each, table.line_width())]
    return [*table.format_table(rows, "<>>>>>"), *said]
