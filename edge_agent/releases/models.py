"""Releases of models: laid beside each other, checked in a process of their own, exchanged by a link.

    <home>/models/<first 16 of its sha256>/model.onnx     and release.json: which release it is
    <home>/models/<first 16 of its sha256>/shared.safetensors   what was sent, if model.onnx is put together here
    <home>/models/current, previous                       links to such folders; "none" where nothing was before

    <home>/models/<first 16 of its sha256>/model.engine   TensorRT's engine of it, where trtexec is installed
    <home>/check/                                         private folders of the check's process

Where boards have parts of a network each for themselves (`fedquilt.personal`), what is sent is one thing and the
model another: the check begins by making model.onnx of the blob and of what this board has kept of the run.

The check's process writes only its private folders. Once it has ended, what it made is copied from there.

A link is exchanged by the rename of one that was made beside it, so whoever follows `current` finds the one or the
other. Folders with other names are somebody else's, and are left alone.
"""

from __future__ import annotations

import errno
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from fedquilt import footprint, graph_check, personal
from fedquilt.core import UNDECODABLE, Count, Device, Digest, Label, ModelError, StoreError, Told
from fedquilt.disk import REAL, Disk, doing
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.power.energy import Ledger
from fedquilt.edge_agent.releases.hook import Hook
from fedquilt.edge_agent.releases.judging import judged, undecided, worse
from fedquilt.edge_agent.releases.kind import Kind, Verdict
from fedquilt.edge_agent.releases.protocol import DONE, TENSORRT, TIMED, CheckOrder, Parted
from fedquilt.edge_agent.remembered import Private
from fedquilt.edge_agent.served import Runner, Served
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task import confine
from fedquilt.edge_agent.task.protocol import Outcome, Progressed
from fedquilt.edge_agent.task.worker import ChildWorker
from fedquilt.wire import Release

MODEL, SHARED, RELEASE = "model.onnx", "shared.safetensors", "release.json"
CURRENT, PREVIOUS, NOTHING = "current", "previous", "none"
CHECK_S: Final = 900.0  # most that a check may take, without the building of a TensorRT engine
METERED_S: Final = 3.0  # length of the timed answers on a board with a meter, for joules; else TIMED_S
TIMED_S: Final = 1.0
KILLED_MOST: Final = 2  # most restarts of a check whose process was killed from outside
FAILED_LEAST: Final = 5  # failures of the runner with a model, and by how much more often than before, of its answers:
FAILED_SHARE: Final = (
    0.1  # with more the model does not hold up. Requests that are wrong themselves fail with any model
)
TAKEN_UP_S: Final = 45.0  # after an exchange a runner that is there answers with the new model
QUIET_S: Final = 30.0  # no model is settled while the runner, which writes every 20 s, has written nothing for longer
LABELS_S: Final = 60.0  # without another label, after which the labels so far decide on a model that soaks
LABELS_MOST_S: Final = 900.0  # after the exchange, likewise

_NAME: Final = re.compile(r"[0-9a-f]{16}(\.part)?\Z")
_NO_LINKS: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES, errno.EOPNOTSUPP)


class Laid(Told, frozen=True):
    """Content of release.json."""

    model: Digest
    rollout: Label
    name: Label
    serial: Count


class Models(Kind):
    """Models on one board.

    Args:
        settings: of the agent.
        board: its meter measures the joules of an answer.
        worker: carries checks out, one at a time.
        budget_bytes: most that a check may hold resident, now; None: as in the settings.
        disk: where the models are.
        kept: the private state that this board has of a run.
        examine: checks a graph's file before anything runs it.
        clock: seconds that pass.
    """

    def __init__(
        self,
        settings: AgentSettings,
        board: Device,
        worker: ChildWorker,
        budget_bytes: Callable[[], int] | None = None,
        disk: Disk = REAL,
        *,
        kept: Callable[[str], Private] = lambda job: Private(),
        examine: Callable[[Path], object] = graph_check.of_file,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder(settings)
        self.runner = Runner(self.folder, disk, clock)
        self._settings, self._board, self._worker, self._disk = settings, board, worker, disk
        self._kept, self._examine, self._clock = kept, examine, clock
        self._budget_bytes = budget_bytes or (lambda: settings.budget_bytes(board.memory_bytes))
        self._shared = settings.models.folder is not None
        self._hook = Hook(settings.models.hook, settings.models.timeout_s, clock)
        self._out = Path(settings.home).absolute() / confine.CHECK / confine.OUT
        self._known: dict[str, str] = {}  # folder -> the blob (sha256) that its model is made of
        self._made: dict[str, str] = {}  # folder -> the model's file (sha256), if it was put together here
        self._check: tuple[Release, float] | None = None  # the release under check, and the check's time limit
        self._killed = 0
        self._outcome: Outcome | None = None
        self._ledger: Ledger | None = None  # energy of the timed answers
        self._answers_j: float | None = None
        self._first: Served | None = None  # the runner's first report on the model in use
        self._before: Served | None = None  # the runner's last report on the model before; not kept over restarts
        self._min_gain: float | None = None  # limit of the release in use
        self._exchanged_s = clock()
        self._labelled = (0, self._exchanged_s)  # labels of the model in use, and when their number has changed
        self._there = False  # whether a runner was there at the exchange

    # -- what is in use --

    def current(self) -> str:
        """See `Kind`."""
        name = self._disk.target(self.folder / CURRENT)
        return "" if name is None else self._model(name)

    def _answers(self) -> str:
        """Model file (sha256) that a runner which follows `current` answers with; "": none is in use."""
        name = self._disk.target(self.folder / CURRENT)
        if name is None or not self._disk.is_file(self.folder / name / SHARED):
            return self.current()
        if name not in self._made:
            try:
                self._made[name] = self._disk.digest(self.folder / name / MODEL)
            except OSError:
                return ""
        return self._made[name]

    def _model(self, name: str) -> str:
        """Blob (sha256) of a model's folder, hashed anew where release.json is damaged; "": there is none."""
        if name not in self._known:
            try:
                payload = self._disk.read(self.folder / name / RELEASE)
                found = msgspec.json.decode(payload, type=Laid).model
            except (OSError, *UNDECODABLE):
                try:
                    parted = self._disk.is_file(self.folder / name / SHARED)
                    found = self._disk.digest(self.folder / name / (SHARED if parted else MODEL))
                except OSError:
                    return ""
                if found[:16] != name:
                    return ""
            self._known[name] = found
        return self._known[name]

    # -- stage --

    def stage(self, release: Release, blob: Path | None) -> None:
        """See `Kind`."""
        assert blob is not None
        assert release.blob is not None
        name, disk = release.blob.sha256[:16], self._disk
        part, whole = self.folder / f"{name}.part", self.folder / name
        if name == disk.target(self.folder / PREVIOUS) and self._model(name) == release.blob.sha256:
            return  # the model ran here before
        with doing(f"lay the model {release.name} into {self.folder}", "free some space"):
            if not disk.is_dir(self.folder):
                disk.settle(self.folder)
                if self._shared:
                    disk.permit(self.folder, 0o750)
            for left in (part, whole):
                disk.remove(left)
            disk.make(part)
            file = MODEL if personal.task(blob, disk) is None else SHARED
            self._lay(blob, part / file)
            laid = Laid(model=release.blob.sha256, rollout=release.rollout, name=release.name, serial=release.serial)
            disk.write(part / RELEASE, msgspec.json.encode(laid))
            for each in (file, RELEASE):
                disk.sync(part / each)
        try:
            if file == MODEL:  # a model with parts is made and examined by the check
                self._examine(part / MODEL)
        except ModelError as error:
            raise ModelError(f"the model cannot be run: {error}") from None
        with doing(f"lay the model {release.name} into {self.folder}", "free some space"):
            if self._shared:
                for path, mode in ((part / file, 0o640), (part / RELEASE, 0o640), (part, 0o750)):
                    disk.permit(path, mode)
            disk.sync(part)
            disk.replace(part, whole)
            disk.sync(self.folder)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        self._made.pop(name, None)

    def _lay(self, blob: Path, target: Path) -> None:
        """Link a blob's file, or copy it where it cannot be linked, or may not as others are to read it."""
        if not self._shared:
            try:
                return self._disk.link(blob, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
        self._disk.copy(blob, target)

    # -- check --

    def need_bytes(self, release: Release) -> int:
        """See `Kind`."""
        size = 0 if release.blob is None else release.blob.size
        return footprint.need_bytes("onnx", 2 * size)

    def begin_check(self, release: Release) -> None:
        """See `Kind`."""
        if "onnx" not in engines.available():
            raise ModelError("models cannot be checked here: install onnxruntime (pip install 'fedquilt[onnx]')")
        now_s = self._clock()
        building_s = self._settings.models.tensorrt_s if _trtexec() else 0.0
        self._check, self._killed = (release, now_s + CHECK_S + building_s), 0
        self._start_check(release, now_s)

    def _start_check(self, release: Release, now_s: float) -> None:
        """Start the check of a release's model in the worker, with an empty output folder."""
        assert release.blob is not None
        before = self._disk.target(self.folder / CURRENT)
        self._outcome = self._ledger = self._answers_j = None
        with doing(f"empty {self._out}"):
            self._disk.clear(self._out)
        model = self.folder / release.blob.sha256[:16] / MODEL
        parted = self._parts_of_model(model.parent)
        order = CheckOrder(
            model=str(model if parted is None else self._out / MODEL),
            out=str(self._out),
            before=None if before is None or not self._model(before) else str(self.folder / before / MODEL),
            budget_bytes=self._budget_bytes(),
            data=self._settings.data,
            plugins=self._settings.plugins,
            timed_s=METERED_S if _metered(self._board, now_s) else TIMED_S,
            trtexec=_trtexec() if self._settings.models.tensorrt_s else None,
            trtexec_s=self._settings.models.tensorrt_s,
            parted=parted,
            input_shape=release.input_shape,
        )
        self._worker.start(order, now_s)

    def _parts_of_model(self, folder: Path) -> Parted | None:
        """Return the files from which the device assembles its model, or None if the model was sent whole."""
        shared = folder / SHARED
        with doing(f"read {shared}"):
            task = personal.task(shared, self._disk) if self._disk.is_file(shared) else None
        if task is None:
            return None
        kept = self._kept(task.job)
        return Parted(str(shared), self._settings.device, kept.path, kept.sha256, kept.lost)

    def checked(self) -> Verdict | None:
        """Return the verdict of the running check, or None while it goes on. Start a killed check again."""
        if self._check is None:
            return Verdict("its check was not begun", {})
        (release, end_s), now_s = self._check, self._clock()
        if self._ledger is not None:
            self._ledger = self._ledger.seen(now_s, self._board.read(now_s))
        for event in self._worker.poll(now_s):
            match event:
                case Progressed(fraction) if fraction == TIMED:
                    self._ledger = Ledger(now_s).seen(now_s, self._board.read(now_s))
                case Progressed(fraction) if fraction == DONE and self._ledger is not None:
                    ledger = self._ledger.seen(now_s, self._board.read(now_s))
                    self._answers_j, self._ledger = ledger.cost(now_s, None).energy_j, None
                case Outcome(killed=True) if self._killed < KILLED_MOST:
                    self._killed += 1
                    self._start_check(release, now_s)
                case Outcome():
                    self._end_check()  # also of processes that it has started: nobody writes its folders any more
                    verdict = judged(release.limits, event, self._answers_j)
                    return verdict if verdict.refused else self._store_check_output(release, verdict)
        if now_s > end_s:
            self._end_check()
            return Verdict("its check did not come to an end: it was ended", {})
        return None

    def _store_check_output(self, release: Release, verdict: Verdict) -> Verdict:
        """Copy the files that the check wrote beside the model. Return the verdict, or a refusal."""
        assert release.blob is not None
        folder, disk = self.folder / release.blob.sha256[:16], self._disk
        made = [MODEL] if disk.is_file(folder / SHARED) else []
        if disk.is_file(self._out / TENSORRT):
            made.append(TENSORRT)
        try:
            for name in made:
                part = folder / f"{name}.part"
                with doing(f"copy {self._out / name} into {folder}", "free some space"):
                    disk.remove(part)
                    disk.copy_untrusted(self._out / name, part, self._budget_bytes())  # it had to fit into memory
                    if self._shared:
                        disk.permit(part, 0o640)
                    disk.sync(part)
                    if name == MODEL:
                        self._examine(part)
                    disk.replace(part, folder / name)
                    disk.sync(folder)
        except (ModelError, StoreError) as error:
            return Verdict(f"what the check has made cannot be used: {error}", {})
        self._forget(folder.name)
        return verdict

    def _end_check(self) -> None:
        self._check = None
        self._worker.close()

    def fds(self) -> Sequence[int]:
        """See `Kind`."""
        return self._worker.fds()

    # -- exchange --

    def swap(self, release: Release) -> None:
        """See `Kind`."""
        assert release.blob is not None
        name, now = release.blob.sha256[:16], self._disk.target(self.folder / CURRENT)
        if now != name:
            if not self._disk.is_file(self.folder / name / MODEL):
                raise StoreError(f"the model is gone from {self.folder / name}: deploy it again")
            told = self.runner.look()
            self._before = told if told is not None and told.model == self._answers() else None
            with doing(f"exchange the model in {self.folder}", "free some space"):
                self._disk.point(self.folder / PREVIOUS, NOTHING if now is None else now)
                self._disk.point(self.folder / CURRENT, name)
        self._min_gain = release.limits.min_gain
        self._exchanged()

    def back(self) -> bool:
        """See `Kind`."""
        previous = self._disk.target(self.folder / PREVIOUS)
        if previous is None or (previous != NOTHING and not self._disk.is_file(self.folder / previous / MODEL)):
            return False
        with doing(f"return to the model before in {self.folder}", "free some space"):
            if previous == NOTHING:
                self._disk.unlink(self.folder / CURRENT)
                self._disk.sync(self.folder)
            elif previous != self._disk.target(self.folder / CURRENT):
                self._disk.point(self.folder / CURRENT, previous)
        self._before = None
        self._exchanged()
        return True

    def _exchanged(self) -> None:
        """Run the owner's hook, and watch the runner from now on."""
        self._first, self._exchanged_s = None, self._clock()
        self._labelled = (0, self._exchanged_s)
        self._there = self.runner.look() is not None and self.runner.quiet_s <= QUIET_S
        environment = {"FEDQUILT_MODELS": str(self.folder), "FEDQUILT_MODEL": str(self.folder / CURRENT / MODEL)}
        self._hook.start(environment)

    def settled(self) -> bool:
        """See `Kind`."""
        return not self._hook.runs and self._runner_follows() and not self._awaits_labels()

    def _runner_follows(self) -> bool:
        """Whether a runner, if any, has taken the model up and still writes; `ill` ends the wait for both."""
        told, now = self.runner.look(), self._answers()
        if told is None or not now:
            return True
        if told.model != now:
            return self._clock() > self._exchanged_s + TAKEN_UP_S
        return self.runner.quiet_s <= QUIET_S

    def _awaits_labels(self) -> bool:
        """Return whether labels arrive that may yet show that the model in use misses its limit."""
        told, now_s = self.runner.look(), self._clock()
        if told is None or told.model != self._answers():
            return False
        if told.labelled != self._labelled[0]:
            self._labelled = (told.labelled, now_s)
        if now_s > min(self._labelled[1] + LABELS_S, self._exchanged_s + LABELS_MOST_S):
            return False
        return undecided(self._min_gain, self._before, told)

    def ill(self) -> str:
        """See `Kind`."""
        if failed := self._hook.failed:
            return failed
        name = self._disk.target(self.folder / CURRENT)
        if name is not None and not self._disk.is_file(self.folder / name / MODEL):
            return f"its file is gone from {self.folder / name}"
        return self._runner_fails()

    def _runner_fails(self) -> str:
        """Failure of the runner with the model in use; "": there is none, or no runner."""
        told = self.runner.look()
        if told is None:
            was = self._there or self._first is not None
            return "the model runner has fallen silent with it" if was else ""
        if told.model != self._answers():
            late = self._clock() > self._exchanged_s + TAKEN_UP_S
            return "the model runner has not taken it up: it answers with another model" if late else ""
        first = self._first
        if first is None or told.served < first.served or told.failed < first.failed:  # the runner has started anew
            self._first = first = told if first is None else Served(model=told.model)
        failed, answers = told.failed - first.failed, told.failed - first.failed + told.served - first.served
        usual = first.failed / max(first.failed + first.served, 1)
        if failed < FAILED_LEAST or failed <= (FAILED_SHARE + usual) * answers:
            return worse(self._min_gain, self._before, told)
        return f"the model runner failed {failed} of {answers} times with it"

    def drop(self) -> None:
        """See `Kind`."""
        if self._check is not None:
            self._end_check()
        if not self._disk.is_dir(self.folder):
            return
        with doing(f"delete old models in {self.folder}"):
            used = {link: self._disk.target(self.folder / link) for link in (CURRENT, PREVIOUS)}
            if used[PREVIOUS] is not None and used[PREVIOUS] == (used[CURRENT] or NOTHING):
                self._disk.unlink(self.folder / PREVIOUS)  # no model before it to return to
            for entry in self._disk.entries(self.folder):
                if entry.is_dir and _NAME.match(entry.name) and entry.name not in used.values():
                    self._disk.remove(self.folder / entry.name)
                    self._forget(entry.name)


def folder(settings: AgentSettings) -> Path:
    """The folder of a board's models."""
    return Path(settings.models.folder or Path(settings.home) / "models").absolute()


def _trtexec() -> str | None:
    """TensorRT's own program, where it is installed."""
    return shutil.which("trtexec")


def _metered(board: Device, now_s: float) -> bool:
    reading = board.read(now_s)
    return reading.energy_j is not None or reading.power_w is not None
