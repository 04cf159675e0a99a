"""Releases of models: stored side by side, checked in a process, activated by a symbolic link.

    <home>/models/<first 16 of its sha256>/model.onnx     and release.json, the release's manifest
    <home>/models/<first 16 of its sha256>/shared.safetensors   shared parts, if model.onnx is assembled here
    <home>/models/current, previous                       links to such folders, "none" without a previous model

    <home>/models/<first 16 of its sha256>/model.engine   TensorRT's engine, where trtexec is installed
    <home>/check/                                         private folders of the check's process

Where devices have private parts of a network (`fedquilt.formats.personal_models`), the blob is not the model: the check
first assembles model.onnx from the blob and the device's private state. The check's process writes only its private
folders, and its output is copied from there after it has ended.

A link is replaced by renaming a new one, so a reader of `current` finds either the old or the new model. Folders with
other names belong to somebody else and stay untouched.
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

from fedquilt import extras
from fedquilt.core import DECODE_ERRORS, Count, Device, DeviceReport, Digest, ModelError, ShortText, StoreError
from fedquilt.costs import peak_memory
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.agent_state import PrivateState
from fedquilt.edge_agent.power.task_power import EnergyAccount
from fedquilt.edge_agent.releases.acceptance import accuracy_loss_reason, judge_check, needs_more_labels
from fedquilt.edge_agent.releases.process import ReleaseHook
from fedquilt.edge_agent.releases.release_kind import CheckResult, ReleaseKind
from fedquilt.edge_agent.runner_status import RunnerStatus, RunnerStatusReader
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.task import sandbox
from fedquilt.edge_agent.task.protocol import (
    DONE,
    TENSORRT,
    TENSORRT_S,
    TIMED,
    CheckRequest,
    ProgressReport,
    SplitModelFiles,
    WorkResult,
)
from fedquilt.edge_agent.task.worker import ChildWorker
from fedquilt.formats import personal_models
from fedquilt.host.disk import REAL, Disk, disk_errors
from fedquilt.wire import DesiredRelease

MODEL, SHARED, RELEASE = "model.onnx", "shared.safetensors", "release.json"
CURRENT, PREVIOUS, NOTHING = "current", "previous", "none"
CHECK_S: Final = 900.0  # most that a check may take, without the building of a TensorRT engine
METERED_S: Final = 3.0  # length of the timed answers on a board with a meter, for joules; else TIMED_S
TIMED_S: Final = 1.0
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


def _check_graph(path: Path) -> object:
    from fedquilt.onnx import graph_check  # here, as an idle agent has no model to check

    return graph_check.check_file(path)


class ReleaseManifest(DeviceReport, frozen=True):
    model: Digest
    rollout: ShortText
    name: ShortText
    serial: Count


class ModelReleases(ReleaseKind):
    def __init__(
        self,
        settings: AgentSettings,
        board: Device,
        worker: ChildWorker,
        budget_bytes: Callable[[], int] | None = None,
        disk: Disk = REAL,
        *,
        kept: Callable[[str], PrivateState] = lambda job: PrivateState(),
        examine: Callable[[Path], object] = _check_graph,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = models_folder(settings)
        self.runner = RunnerStatusReader(self.folder, disk, clock)
        self._settings, self._board, self._worker, self._disk = settings, board, worker, disk
        self._kept, self._examine, self._clock = kept, examine, clock
        self._budget_bytes = budget_bytes or (lambda: settings.task_budget_bytes(board.memory_bytes))
        self._shared = settings.models.folder is not None
        self._hook = ReleaseHook(settings.models.hook, clock)
        self._out = Path(settings.home).absolute() / sandbox.CHECK / sandbox.OUT
        self._known: dict[str, str] = {}  # folder -> the blob (sha256) that its model is made of
        self._made: dict[str, str] = {}  # folder -> the model's file (sha256), if it was put together here
        self._check: tuple[DesiredRelease, float] | None = None  # the release under check, and the check's time limit
        self._ledger: EnergyAccount | None = None  # energy of the timed answers
        self._answers_j: float | None = None
        self._first: RunnerStatus | None = None  # the runner's first report on the model in use
        self._before: RunnerStatus | None = None  # the runner's last report on the model before; not kept over restarts
        self._min_gain: float | None = None  # limit of the release in use
        self._exchanged_s = clock()
        self._labelled = (0, self._exchanged_s)  # labels of the model in use, and when their number has changed
        self._there = False  # whether a runner was there at the exchange

    # -- what is in use --

    def current_sha256(self) -> str:
        name = self._disk.read_link(self.folder / CURRENT)
        return "" if name is None else self._blob_sha256(name)

    def _served_sha256(self) -> str:
        """Return the sha256 of the model file in use, also of an assembled model, or "" if unreadable."""
        name = self._disk.read_link(self.folder / CURRENT)
        if name is None or not self._disk.is_file(self.folder / name / SHARED):
            return self.current_sha256()
        if name not in self._made:
            try:
                self._made[name] = self._disk.hash_file(self.folder / name / MODEL)
            except OSError:
                return ""
        return self._made[name]

    def _blob_sha256(self, name: str) -> str:
        if name not in self._known:
            try:
                payload = self._disk.read(self.folder / name / RELEASE)
                found = msgspec.json.decode(payload, type=ReleaseManifest).model
            except (OSError, *DECODE_ERRORS):
                try:
                    parted = self._disk.is_file(self.folder / name / SHARED)
                    found = self._disk.hash_file(self.folder / name / (SHARED if parted else MODEL))
                except OSError:
                    return ""
                if found[:16] != name:
                    return ""
            self._known[name] = found
        return self._known[name]

    # -- stage --

    def stage(self, release: DesiredRelease, blob: Path | None) -> None:
        """Store a model beside the model in use, and check its graph unless the check assembles the model."""
        assert blob is not None
        assert release.blob is not None
        name, disk = release.blob.sha256[:16], self._disk
        part, whole = self.folder / f"{name}.part", self.folder / name
        if name == disk.read_link(self.folder / PREVIOUS) and self._blob_sha256(name) == release.blob.sha256:
            return  # the model ran here before
        with disk_errors(f"lay the model {release.name} into {self.folder}", "free some space"):
            if not disk.is_dir(self.folder):
                disk.make_durable_folder(self.folder)
                if self._shared:
                    disk.set_mode(self.folder, 0o750)
            for left in (part, whole):
                disk.remove(left)
            disk.make_folder(part)
            file = MODEL if personal_models.read_task(blob, disk) is None else SHARED
            self._link_or_copy(blob, part / file)
            laid = ReleaseManifest(
                model=release.blob.sha256, rollout=release.rollout, name=release.name, serial=release.serial
            )
            disk.write(part / RELEASE, msgspec.json.encode(laid))
            for each in (file, RELEASE):
                disk.sync(part / each)
        try:
            if file == MODEL:  # a model with parts is made and examined by the check
                self._examine(part / MODEL)
        except ModelError as error:
            raise ModelError(f"the model cannot be run: {error}") from None
        with disk_errors(f"lay the model {release.name} into {self.folder}", "free some space"):
            if self._shared:
                for path, mode in ((part / file, 0o640), (part / RELEASE, 0o640), (part, 0o750)):
                    disk.set_mode(path, mode)
            disk.sync(part)
            disk.replace(part, whole)
            disk.sync(self.folder)
        self._forget_hashes(name)

    def _forget_hashes(self, name: str) -> None:
        self._known.pop(name, None)
        self._made.pop(name, None)

    def _link_or_copy(self, blob: Path, target: Path) -> None:
        # A folder that other users may read gets a copy, whose permissions can be changed.
        if not self._shared:
            try:
                return self._disk.hard_link(blob, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
        self._disk.copy(blob, target)

    # -- check --

    def check_memory_bytes(self, release: DesiredRelease) -> int:
        size = 0 if release.blob is None else release.blob.size
        return peak_memory.task_process_bytes("onnx", 2 * size)

    def start_check(self, release: DesiredRelease) -> None:
        if "onnx" not in engines.available_engines():
            raise ModelError(
                f"models cannot be checked here, without ONNX Runtime: {extras.installation_command('onnx')}"
            )
        now_s = self._clock()
        building_s = TENSORRT_S if _find_trtexec() else 0.0
        self._check = release, now_s + CHECK_S + building_s
        assert release.blob is not None
        before = self._disk.read_link(self.folder / CURRENT)
        self._ledger = self._answers_j = None
        with disk_errors(f"empty {self._out}"):
            self._disk.clear_folder(self._out)
        model = self.folder / release.blob.sha256[:16] / MODEL
        parted = self._parts_of_model(model.parent)
        order = CheckRequest(
            model=str(model if parted is None else self._out / MODEL),
            out=str(self._out),
            before=None if before is None or not self._blob_sha256(before) else str(self.folder / before / MODEL),
            budget_bytes=self._budget_bytes(),
            data=self._settings.data,
            plugins=self._settings.plugins,
            timed_s=METERED_S if _has_meter(self._board, now_s) else TIMED_S,
            trtexec=_find_trtexec(),
            parted=parted,
            input_shape=release.input_shape,
        )
        self._worker.start(order, now_s)

    def _parts_of_model(self, folder: Path) -> SplitModelFiles | None:
        shared = folder / SHARED
        with disk_errors(f"read {shared}"):
            task = personal_models.read_task(shared, self._disk) if self._disk.is_file(shared) else None
        if task is None:
            return None
        kept = self._kept(task.job)
        return SplitModelFiles(str(shared), self._settings.device, kept.path, kept.sha256, kept.lost)

    def poll_check(self) -> CheckResult | None:
        if self._check is None:
            return CheckResult("its check was not begun", {})
        (release, end_s), now_s = self._check, self._clock()
        if self._ledger is not None:
            self._ledger = self._ledger.with_reading(now_s, self._board.read_sensors(now_s))
        for event in self._worker.poll_events(now_s):
            match event:
                case ProgressReport(fraction) if fraction == TIMED:
                    self._ledger = EnergyAccount(now_s).with_reading(now_s, self._board.read_sensors(now_s))
                case ProgressReport(fraction) if fraction == DONE and self._ledger is not None:
                    ledger = self._ledger.with_reading(now_s, self._board.read_sensors(now_s))
                    self._answers_j, self._ledger = ledger.cost_until(now_s, None).energy_j, None
                case WorkResult():
                    self._end_check()  # also of processes that it has started: nobody writes its folders any more
                    verdict = judge_check(release.limits, event, self._answers_j)
                    return verdict if verdict.refused else self._store_check_output(release, verdict)
        if now_s > end_s:
            self._end_check()
            return CheckResult("its check did not come to an end: it was ended", {})
        return None

    def _store_check_output(self, release: DesiredRelease, verdict: CheckResult) -> CheckResult:
        assert release.blob is not None
        folder, disk = self.folder / release.blob.sha256[:16], self._disk
        made = [MODEL] if disk.is_file(folder / SHARED) else []
        if disk.is_file(self._out / TENSORRT):
            made.append(TENSORRT)
        try:
            for name in made:
                part = folder / f"{name}.part"
                with disk_errors(f"copy {self._out / name} into {folder}", "free some space"):
                    disk.remove(part)
                    disk.copy_untrusted(self._out / name, part, self._budget_bytes())  # it had to fit into memory
                    if self._shared:
                        disk.set_mode(part, 0o640)
                    disk.sync(part)
                    if name == MODEL:
                        self._examine(part)
                    disk.replace(part, folder / name)
                    disk.sync(folder)
        except (ModelError, StoreError) as error:
            return CheckResult(f"what the check has made cannot be used: {error}", {})
        self._forget_hashes(folder.name)
        return verdict

    def _end_check(self) -> None:
        self._check = None
        self._worker.close()

    def fds(self) -> Sequence[int]:
        return self._worker.fds()

    # -- exchange --

    def activate(self, release: DesiredRelease) -> None:
        """Point `current` at the model and `previous` at the one before, and start the owner's hook."""
        assert release.blob is not None
        name, now = release.blob.sha256[:16], self._disk.read_link(self.folder / CURRENT)
        if now != name:
            if not self._disk.is_file(self.folder / name / MODEL):
                raise StoreError(f"the model is gone from {self.folder / name}: roll it out again")
            told = self.runner.read_status()
            self._before = told if told is not None and told.model == self._served_sha256() else None
            with disk_errors(f"exchange the model in {self.folder}", "free some space"):
                self._disk.repoint_link(self.folder / PREVIOUS, NOTHING if now is None else now)
                self._disk.repoint_link(self.folder / CURRENT, name)
        self._min_gain = release.limits.min_gain
        self._start_observation_and_hook()

    def roll_back(self) -> bool:
        """Activate the previous model, or none, and start the hook. Return False without a previous state."""
        previous = self._disk.read_link(self.folder / PREVIOUS)
        if previous is None or (previous != NOTHING and not self._disk.is_file(self.folder / previous / MODEL)):
            return False
        with disk_errors(f"return to the model before in {self.folder}", "free some space"):
            if previous == NOTHING:
                self._disk.unlink(self.folder / CURRENT)
                self._disk.sync(self.folder)
            elif previous != self._disk.read_link(self.folder / CURRENT):
                self._disk.repoint_link(self.folder / CURRENT, previous)
        self._before = None
        self._start_observation_and_hook()
        return True

    def _start_observation_and_hook(self) -> None:
        self._first, self._exchanged_s = None, self._clock()
        self._labelled = (0, self._exchanged_s)
        self._there = self.runner.read_status() is not None and self.runner.unchanged_s <= QUIET_S
        environment = {"FEDQUILT_MODELS": str(self.folder), "FEDQUILT_MODEL": str(self.folder / CURRENT / MODEL)}
        self._hook.start(environment)

    def is_settled(self) -> bool:
        return not self._hook.is_running and self._is_runner_up_to_date() and not self._awaits_labels()

    def _is_runner_up_to_date(self) -> bool:
        """Return whether the runner serves the model in use, is inactive, or had enough time to change."""
        told, now = self.runner.read_status(), self._served_sha256()
        if told is None or not now:
            return True
        if told.model != now:
            return self._clock() > self._exchanged_s + TAKEN_UP_S
        return self.runner.unchanged_s <= QUIET_S

    def _awaits_labels(self) -> bool:
        told, now_s = self.runner.read_status(), self._clock()
        if told is None or told.model != self._served_sha256():
            return False
        if told.labelled != self._labelled[0]:
            self._labelled = (told.labelled, now_s)
        if now_s > min(self._labelled[1] + LABELS_S, self._exchanged_s + LABELS_MOST_S):
            return False
        return needs_more_labels(self._min_gain, self._before, told)

    def unhealthy_reason(self) -> str:
        if failed := self._hook.failure:
            return failed
        name = self._disk.read_link(self.folder / CURRENT)
        if name is not None and not self._disk.is_file(self.folder / name / MODEL):
            return f"its file is gone from {self.folder / name}"
        return self._runner_failure()

    def _runner_failure(self) -> str:
        told = self.runner.read_status()
        if told is None:
            was = self._there or self._first is not None
            return "the model runner has fallen silent with it" if was else ""
        if told.model != self._served_sha256():
            late = self._clock() > self._exchanged_s + TAKEN_UP_S
            return "the model runner has not taken it up: it answers with another model" if late else ""
        first = self._first
        if first is None or told.served < first.served or told.failed < first.failed:  # the runner has started anew
            self._first = first = told if first is None else RunnerStatus(model=told.model)
        failed, answers = told.failed - first.failed, told.failed - first.failed + told.served - first.served
        usual = first.failed / max(first.failed + first.served, 1)
        if failed < FAILED_LEAST or failed <= (FAILED_SHARE + usual) * answers:
            return accuracy_loss_reason(self._min_gain, self._before, told)
        return f"the model runner failed {failed} of {answers} times with it"

    def discard_unused(self) -> None:
        if self._check is not None:
            self._end_check()
        if not self._disk.is_dir(self.folder):
            return
        with disk_errors(f"delete old models in {self.folder}"):
            used = {link: self._disk.read_link(self.folder / link) for link in (CURRENT, PREVIOUS)}
            if used[PREVIOUS] is not None and used[PREVIOUS] == (used[CURRENT] or NOTHING):
                self._disk.unlink(self.folder / PREVIOUS)  # no model before it to return to
            for entry in self._disk.entries(self.folder):
                if entry.is_dir and _NAME.match(entry.name) and entry.name not in used.values():
                    self._disk.remove(self.folder / entry.name)
                    self._forget_hashes(entry.name)


def models_folder(settings: AgentSettings) -> Path:
    return Path(settings.models.folder or Path(settings.home) / "models").absolute()


def _find_trtexec() -> str | None:
    return shutil.which("trtexec")


def _has_meter(board: Device, now_s: float) -> bool:
    reading = board.read_sensors(now_s)
    return reading.energy_j is not None or reading.power_w is not None
