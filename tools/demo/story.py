"""`fedquilt demo --story`: a fleet serves a model, its inputs change, and it gets another one, but not the bad one.

Every step is a command of this program in a process of its own, and every number is read from what these leave behind:
the coordinator's home, and the answers of the boards' runners. Only the boards are simulated: their times and joules
follow their profiles.
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

from fedquilt import columns, config, disk, progress, units
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.boards_store import BoardStore
from fedquilt.coordinator.facts import Answered
from fedquilt.coordinator.rollout_log import Kept
from fedquilt.coordinator.rollouts import SETTLED
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.views import costs
from fedquilt.core import Examples, JobError
from fedquilt.tools.artefacts import export
from fedquilt.tools.broker import EmbeddedBroker
from fedquilt.tools.demo import HERE, changed, told
from fedquilt.tools.demo.live import Teller, bold
from fedquilt.tools.demo.streams import Streams, address
from fedquilt.tools.demo.told import Moment, Stream
from fedquilt.tools.report import plots
from fedquilt.tools.simulation import agents, children

BOARDS: Final = 8
TICK_S: Final = 0.4  # between two looks at how far it is
LIMIT_S: Final = 900.0  # for a step, also on a busy machine
TELEMETRY_S: Final = 2.0
DRIFTED: Final = 0.3  # told by every board, before something is done about it
AFTER: Final = 400  # answers of each board to changed inputs, before something is done about them
LOOK_S: Final = 0.2
CANARY: Final = ("--canary", "12%", "--phases", "100")
JOB, DATA, HOME, BAD = "digits", "digits.npz", "runs", "bright-only.onnx"


def story(out: Path, format: str = "text", show: bool = False, boards: int = BOARDS) -> int:
    """Tell the story, and write its page into `out`.

    Args:
        out: folder, created if missing.
        format: "text", or "json" for what it came to as one line.
        show: open the page in a browser.
        boards: how many there are.

    Raises:
        JobError: a step did not come to what follows from it, or a process ended.
    """
    folder = (out / time.strftime("story-%Y%m%d-%H%M%S")).resolve()
    began, teller = time.time(), Teller(format == "text")
    with contextlib.ExitStack() as stack, progress.ticking(teller.tick, TICK_S):
        fleet = _Fleet.begin(stack, folder, boards)
        teller.say(*_opening(fleet))
        found, stream, moments = _Plot(fleet, teller, began).play()
    report = out / "story.html"
    result = msgspec.json.encode({**msgspec.to_builtins(found), "report": str(report)}).decode()
    drawn = told.drawn(found, stream, moments)
    disk.write(report, told.html(found, drawn, moments, stream.began))
    disk.write(out / "story.svg", plots.alone(*drawn))
    disk.write(out / "story.json", result + "\n")
    if format != "text":
        print(result)
    else:
        teller.say("", *_ending(found))
        teller.say(f"page, with plots (--open shows it): {report}")
    if show:
        webbrowser.open(report.resolve().as_uri())
    return 0


@dataclass(frozen=True)
class _Fleet:
    """Boards, their coordinator and what lies in the story's folder."""

    folder: Path
    devices: tuple[str, ...]
    store: Store
    processes: dict[str, subprocess.Popen[bytes]]  # by name, those that go on to the end
    train: Examples
    test: Examples

    @property
    def home(self) -> Path:
        """The coordinator's home."""
        return self.folder / HOME

    def models(self, device: str) -> Path:
        """A board's folder of models."""
        return self.folder / "boards" / device / "models"

    def log(self, name: str) -> Path:
        """What a process prints."""
        return self.folder / "logs" / f"{name}.log"

    @classmethod
    def begin(cls, stack: contextlib.ExitStack, folder: Path, boards: int) -> _Fleet:
        """Write the job and the boards' images, and start broker, coordinator and agents."""
        (folder / "logs").mkdir(parents=True)
        held = np.load(HERE / DATA)
        train, test = (Examples(held[f"x_{split}"], held[f"y_{split}"]) for split in ("train", "test"))
        _hold(folder / DATA, train, test)
        table = config.read(HERE / "job.toml")
        table["params"]["expansions"] = 0  # a joint head on the donors' blocks: nothing is stitched, nothing trained
        table["fleet"]["devices"] = table["cohort"]["start_devices"] = boards
        (folder / f"{JOB}.toml").write_text(config.text(table))
        (folder / f"{JOB}.bundle").symlink_to(HERE / "bundle")
        url = stack.enter_context(EmbeddedBroker()).url
        plan = agents.Plan(jobs.load(folder / f"{JOB}.toml"), HERE / "bundle", folder / HOME)
        tables = [
            {**each, "home": str(folder / "boards" / each["device"]), "telemetry_s": TELEMETRY_S}
            for each in plan.agents()
        ]
        store = stack.enter_context(Store(folder / HOME))
        serve = children.Command(["serve", "--home", HOME, "--broker", url], folder / "logs/serve.log", folder)
        running = stack.enter_context(children.running({"serve": serve}))
        running |= stack.enter_context(agents.processes(tables, {"url": url}))
        return cls(folder, tuple(each["device"] for each in tables), store, running, train, test)


def _hold(path: Path, train: Examples, test: Examples) -> None:
    """Write the images that boards have, at once."""
    file = io.BytesIO()
    np.savez_compressed(file, x_train=train.x, y_train=train.y, x_test=test.x, y_test=test.y)
    disk.REAL.put(path, file.getvalue(), durable=False)


class _Plot:
    """The steps of the story, one after the other."""

    def __init__(self, fleet: _Fleet, teller: Teller, began: float) -> None:
        self._fleet, self._teller, self._began = fleet, teller, began
        self._moments: list[Moment] = []

    def play(self) -> tuple[told.Told, Stream, list[Moment]]:
        """Play the whole story; returns its result, the runners' answers and the moments."""
        fleet, count = self._fleet, len(self._fleet.devices)
        self._until(fleet.store.served, "the coordinator starts")  # else `run` would be one itself
        first_run = self._run("boards make a network")
        first = self._deploy([JOB], ["--soak", "1s"], "done")
        with contextlib.ExitStack() as stack:
            streams = self._serve(stack)
            self._until(lambda: self._calm(streams, first), "digits come in, and runners learn what is normal")
            self._happened(f"{_right(streams, self._began)} of the answers are right, and no drift")
            changed_s = self._change(streams)
            bad = self._bad(first_run)
            _hold(fleet.folder / DATA, *self._seen())
            self._happened(f"boards have {len(fleet.train)} labelled images of what they see now")
            last_run = self._run("boards make another network")
            last = self._deploy([JOB], ["--min-gain", "5pt", "--soak", "5s"], "done", "new model")
            streams.pace(fast=True)
            self._until(lambda: self._calm(streams, last), f"{count} runners learn what is normal with the new model")
            since = min(each.at for each in streams.answers if each.model == told.blob(last))
            self._happened(f"{_right(streams, since, told.blob(last))} of the answers are right, and no drift")
        stream = Stream(self._began, changed_s, time.time(), streams.answers, streams.said, streams.failed)
        rollouts = [each.state.id for each in (first, bad, last)]
        return told.tell(fleet.home, fleet.store, [first_run, last_run], rollouts, stream), stream, self._moments

    # -- steps --

    def _run(self, what: str) -> str:
        """Carry the job out, and return the run."""
        before = {row.id for row in self._fleet.store.jobs()}

        def far() -> str:
            begun = [row.id for row in self._fleet.store.jobs() if row.id not in before]
            facts = self._fleet.store.facts(begun[-1]) if begun else ()
            return f"{what}: {sum(isinstance(fact, Answered) for _, _, fact in facts)} answers so far"

        self._command(["run", f"{JOB}.toml", "--home", HOME], far)
        row = self._fleet.store.job(JOB)
        if row.status != "done":
            raise JobError(f"{row.id} is {row.status}: see {self._fleet.log('run')}")
        whole = costs.account(fact for _, _, fact in self._fleet.store.facts(row.id)).whole
        joules = "" if whole.energy_j is None else f", {whole.energy_j:.1f} J"
        size = units.size(whole.down_bytes + whole.up_bytes)
        self._happened(f"a network from {whole.examples:.0f} images{joules}, {size}, nothing trained")
        return row.id

    def _deploy(self, what: Sequence[str], how: Sequence[str], end: str, short: str = "") -> Kept:
        """Bring a model to the boards, and follow the rollout until it has come to the end that is expected."""
        self._command(["deploy", *what, "--home", HOME, *CANARY, *how], "a model is handed over", short=short)
        find = self._fleet.store.rollouts.find
        id = find().state.id

        def ended() -> bool:
            kept = find(id)
            counts = ", ".join(f"{number} {phase or 'asked'}" for phase, number in kept.state.counts().items())
            self._teller.now = f"boards with {kept.state.plan.name}: {counts or 'none yet'}"
            settled = all(kept.state.phase(device) in SETTLED for device in kept.state.offered)
            return not kept.state.under_way and settled

        self._until(ended)
        kept = find(id)
        if kept.state.status != end:
            raise JobError(f"{id} was to be {end} and is {kept.state.status}: {kept.state.reason}")
        if end == "done":
            on = kept.state.counts().get("committed", 0)
            self._happened(f"checked by each, and in use on {on} of {len(self._fleet.devices)} boards")
        return kept

    def _serve(self, stack: contextlib.ExitStack) -> Streams:
        """Start a runner for each board, and the stream of images to them."""
        fleet = self._fleet
        words = {each: ["serve-model", f"boards/{each}/models", "--http", "127.0.0.1:0"] for each in fleet.devices}
        note = f"and one for each of the other {len(fleet.devices) - 1} boards"
        self._say_command(words[fleet.devices[0]], note)
        logs = {device: fleet.log(f"runner-{device}") for device in fleet.devices}
        wanted = {each: children.Command([*words[each], "--threads", "1"], logs[each], fleet.folder) for each in words}
        running = stack.enter_context(children.running(wanted))
        self._fleet.processes.update({f"runner-{device}": process for device, process in running.items()})

        def started() -> bool:
            there = sum(address(log) is not None for log in logs.values())
            self._teller.now = f"the runners start: {there} of {len(logs)} are there"
            return there == len(logs)

        self._until(started)
        urls = {device: address(log) or "" for device, log in logs.items()}
        streams = Streams(urls, {device: fleet.models(device) for device in urls}, fleet.test)
        stack.enter_context(streams.flowing())
        return streams

    def _change(self, streams: Streams) -> float:
        """Let the inputs change, and wait until every board has told of drift; returns when."""
        devices, home = self._fleet.devices, self._fleet.home
        streams.show(self._seen()[1])
        at = time.time()
        self._teller.say("")
        said = f"the cameras are knocked askew, and it gets dark: turned by {changed.DEGREES:g} degrees, "
        self._happened(f"{said}{changed.LIGHT:.0%} of the light, noisier", "inputs change")

        def drifts() -> list[float]:
            with BoardStore(home) as boards:
                return [each.drift or 0.0 for each in boards.latest(time.time()).values()]

        def noticed() -> bool:
            enough = all(streams.count(device, at) >= AFTER for device in devices)
            return enough and sum(drift >= DRIFTED for drift in drifts()) == len(devices)

        self._until(noticed, "the runners answer what they have never seen")
        found = drifts()
        self._happened(f"{_right(streams, at)} of the answers are right; drift {min(found):.2f} to {max(found):.2f}")
        streams.pace(fast=False)
        shown = self._command(["devices", devices[0], "--home", HOME], "the coordinator is asked")
        self._teller.say(*(line for line in shown if line.strip()))
        return at

    def _bad(self, run: str) -> Kept:
        """Deploy a bad model, and see it taken back."""
        fleet = self._fleet
        (fleet.folder / BAD).write_bytes(changed.for_bright_images(export.graph(fleet.store, run)[0]))
        self._teller.say("")
        self._happened(
            "somebody deploys a network that is blind in the dark; on the boards' old images its check finds little"
        )
        kept = self._deploy(["--model", BAD], ["--min-gain", "-15pt", "--soak", "15s"], "aborted", "bad model")
        for device, seconds in told.in_use(fleet.store, kept.state.id).items():
            self._happened(f"{device} had it for {seconds:.1f} s, and went back by itself:")
        why, indent = told.reason(kept), " " * 10
        self._teller.say(*textwrap.wrap(why, columns.width(), initial_indent=indent, subsequent_indent=indent))
        rest = len(fleet.devices) - len(kept.state.offered)
        self._happened(f"the rollout is aborted; {rest} of {len(fleet.devices)} boards were never offered it")
        return kept

    def _seen(self) -> tuple[Examples, Examples]:
        """The images as boards see them now: those that they have labels of, and those that their runners are asked."""
        train, test = self._fleet.train, self._fleet.test
        return Examples(changed.changed(train.x, 0), train.y), Examples(changed.changed(test.x, 1), test.y)

    def _calm(self, streams: Streams, kept: Kept) -> bool:
        """Whether every runner tells accuracy and drift of a rollout's model, and there is none."""
        said, blob = streams.latest(), told.blob(kept)
        return all(
            (own := said.get(device)) is not None
            and own.model == blob
            and own.accuracy is not None
            and own.drift is not None
            and own.drift < DRIFTED
            for device in self._fleet.devices
        )

    # -- what all steps do --

    def _happened(self, said: str, short: str = "") -> None:
        self._moments.append(Moment(time.time(), said, short=short))
        self._teller.happened(said)

    def _say_command(self, words: Sequence[str], note: str = "", short: str = "") -> None:
        self._moments.append(Moment(time.time(), note, f"fedquilt {' '.join(words)}", short))
        self._teller.command(["$ fedquilt", *words], note)

    def _command(self, words: Sequence[str], what: str | Callable[[], str], short: str = "") -> list[str]:
        """Carry a command out to its end; returns what it has printed.

        Raises:
            JobError: it has failed; quotes it.
        """
        self._say_command(words, short=short)
        log = self._fleet.log(f"{words[0]}-{len(self._moments)}")
        process = children.start(children.Command(words, log, self._fleet.folder))
        try:
            self._until(lambda: process.poll() is not None, what)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode:
            raise JobError(f"`fedquilt {' '.join(words)}` ended with {process.returncode}: {children.last_words(log)}")
        return log.read_text().splitlines()

    def _until(self, condition: Callable[[], bool], what: str | Callable[[], str] = "") -> None:
        """Wait until something is so.

        Raises:
            JobError: it is not within LIMIT_S, or one of the processes has ended.
        """
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            self._teller.now = (what if isinstance(what, str) else what()) or self._teller.now
            for name, process in self._fleet.processes.items():
                if process.poll() is not None:
                    raise JobError(f"{name} has ended with {process.returncode}: see {self._fleet.folder}")
            if time.monotonic() > end_s:
                raise JobError(f"not within {units.duration(LIMIT_S)}: {self._teller.now}: see {self._fleet.folder}")
            time.sleep(LOOK_S)


def _right(streams: Streams, since: float, model: str = "") -> str:
    """Share of right answers since a time, of one model if it is given."""
    found = (each for each in list(streams.answers) if each.at >= since and model in ("", each.model))
    return f"{told.share(found) or 0.0:.1%}"


def _opening(fleet: _Fleet) -> list[str]:
    """Lines that introduce the story to readers who do not know it."""
    text = (
        f"{len(fleet.devices)} simulated boards, each with an agent and a model runner, have {len(fleet.train)} "
        "labelled digits. Networks that know MNIST get a new head, which is solved from sums that the boards send: "
        "no training, and no image leaves a board."
    )
    title = "From drift to fixed: a fleet serves a model, and its inputs change."
    return [bold(title), *textwrap.wrap(text, columns.width())]


def _ending(found: told.Told) -> list[str]:
    """Lines that end the story: a row for each board, and the result in sentences."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    rows = [("right answers, %", "at first", "changed", "now", "drift", "had the bad model")]
    for board in found.boards:
        drift = "-" if board.drift is None else f"{board.drift:.2f}"
        bad = "never" if board.bad_s is None else f"{board.bad_s:.1f} s"
        rows.append((board.name, percent(board.before), percent(board.dropped), percent(board.after), drift, bad))
    said = [line for each in told.sentences(found) for line in textwrap.wrap(each, columns.width())]
    return [*columns.table(rows, "<>>>>>"), *said]
