"""Releases of models: stored side by side, checked in a process, activated by a symbolic link.

    <home>/models/<first 16 of its sha256>/model.onnx     and release.json, the release's manifest
    <home>/models/<first 16 of its sha256>/shared.safetensors   shared parts, if model.onnx is assembled here
    <home>/models/current, previous                       links to such folders, "none" without a previous model
    <home>/check/                                         private folders of the check's process

If devices have private parts of a network (`fedquilt.formats.personal_models`), the blob contains only the shared
parts. The check first assembles model.onnx from the blob and the device's private state. The check's process writes
only its private folders. Its output is copied from there after it has ended.

A link is replaced by renaming a new link, so that a reader of `current` finds either the old or the new model. Folders
with other names are not changed.
"""

from __future__ import annotations

import errno
import re
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
    TIMING_ENDED,
    TIMING_STARTED,
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
CHECK_S: Final = 900.0  # time limit of a check
METERED_TIMING_S: Final = 3.0  # duration of the timed runs if a meter measures their energy, else TIMING_S
TIMING_S: Final = 1.0
# A model is unhealthy above both limits of the runner's failures, because malformed requests fail with any model:
MIN_FAILURES: Final = 5  # number of failures
MAX_FAILURE_INCREASE: Final = 0.1  # increase of their share of all answers
RUNNER_RELOAD_S: Final = 45.0  # time for an active runner to serve a new model
MAX_RUNNER_SILENCE_S: Final = 30.0  # silence after which a runner, which reports every 20 s, counts as inactive
LABEL_TIMEOUT_S: Final = 60.0  # time without a new label, after which the present labels decide on a soaking model
MAX_LABEL_WAIT_S: Final = 900.0  # the same, from the activation of the model

_NAME: Final = re.compile(r"[0-9a-f]{16}(\.part)?\Z")
_NO_LINKS: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES, errno.EOPNOTSUPP)


def _check_graph(path: Path) -> object:
    from fedquilt.onnx import graph_check  # imported here, because an idle agent has no model to check

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
        private_state: Callable[[str], PrivateState] = lambda job: PrivateState(),
        check_graph: Callable[[Path], object] = _check_graph,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = models_folder(settings)
        self.runner = RunnerStatusReader(self.folder, disk, clock)
        self._settings, self._board, self._worker, self._disk = settings, board, worker, disk
        self._private_state, self._check_graph, self._clock = private_state, check_graph, clock
        self._budget_bytes = budget_bytes or (lambda: settings.task_budget_bytes(board.memory_bytes))
        self._is_shared_folder = settings.models.folder is not None
        self._hook = ReleaseHook(settings.models.hook, clock)
        self._out = Path(settings.home).absolute() / sandbox.CHECK / sandbox.OUT
        self._blob_hashes: dict[str, str] = {}  # folder -> sha256 of the blob of its model
        self._assembled_hashes: dict[str, str] = {}  # folder -> sha256 of the model file, if assembled on this device
        self._check: tuple[DesiredRelease, float] | None = None  # the release under check, and the check's time limit
        self._energy: EnergyAccount | None = None  # energy of the timed runs
        self._inference_j: float | None = None
        self._first_status: RunnerStatus | None = None  # the runner's first report on the model in use
        # The runner's last report on the previous model, lost at a restart.
        self._previous_status: RunnerStatus | None = None
        self._min_gain: float | None = None  # limit of the release in use
        self._activated_s = clock()
        self._label_progress = (0, self._activated_s)  # number of labels of the model, and time of the last change
        self._had_runner = False  # whether a runner was active at the activation

    # -- what is in use --

    def current_sha256(self) -> str:
        name = self._disk.read_link(self.folder / CURRENT)
        return "" if name is None else self._blob_sha256(name)

    def _served_sha256(self) -> str:
        """Return the sha256 of the model file in use, also of an assembled model, or "" if unreadable."""
        name = self._disk.read_link(self.folder / CURRENT)
        if name is None or not self._disk.is_file(self.folder / name / SHARED):
            return self.current_sha256()
        if name not in self._assembled_hashes:
            try:
                self._assembled_hashes[name] = self._disk.hash_file(self.folder / name / MODEL)
            except OSError:
                return ""
        return self._assembled_hashes[name]

    def _blob_sha256(self, name: str) -> str:
        if name not in self._blob_hashes:
            try:
                payload = self._disk.read(self.folder / name / RELEASE)
                sha256 = msgspec.json.decode(payload, type=ReleaseManifest).model
            except (OSError, *DECODE_ERRORS):
                try:
                    is_split = self._disk.is_file(self.folder / name / SHARED)
                    sha256 = self._disk.hash_file(self.folder / name / (SHARED if is_split else MODEL))
                except OSError:
                    return ""
                if sha256[:16] != name:
                    return ""
            self._blob_hashes[name] = sha256
        return self._blob_hashes[name]

    # -- stage --

    def stage(self, release: DesiredRelease, blob: Path | None) -> None:
        assert blob is not None
        assert release.blob is not None
        name, disk = release.blob.sha256[:16], self._disk
        part, target = self.folder / f"{name}.part", self.folder / name
        if name == disk.read_link(self.folder / PREVIOUS) and self._blob_sha256(name) == release.blob.sha256:
            return  # the previous model is still there
        with disk_errors(f"write model {release.name} into {self.folder}", "free some space"):
            if not disk.is_dir(self.folder):
                disk.make_durable_folder(self.folder)
                if self._is_shared_folder:
                    disk.set_mode(self.folder, 0o750)
            for stale_folder in (part, target):
                disk.remove(stale_folder)
            disk.make_folder(part)
            file = MODEL if personal_models.read_task(blob, disk) is None else SHARED
            self._link_or_copy(blob, part / file)
            manifest = ReleaseManifest(
                model=release.blob.sha256, rollout=release.rollout, name=release.name, serial=release.serial
            )
            disk.write(part / RELEASE, msgspec.json.encode(manifest))
            for name_to_sync in (file, RELEASE):
                disk.sync(part / name_to_sync)
        try:
            if file == MODEL:  # the check assembles and verifies a model with parts
                self._check_graph(part / MODEL)
        except ModelError as error:
            raise ModelError(f"model cannot be run: {error}") from None
        with disk_errors(f"write model {release.name} into {self.folder}", "free some space"):
            if self._is_shared_folder:
                for path, mode in ((part / file, 0o640), (part / RELEASE, 0o640), (part, 0o750)):
                    disk.set_mode(path, mode)
            disk.sync(part)
            disk.replace(part, target)
            disk.sync(self.folder)
        self._forget_hashes(name)

    def _forget_hashes(self, name: str) -> None:
        self._blob_hashes.pop(name, None)
        self._assembled_hashes.pop(name, None)

    def _link_or_copy(self, blob: Path, target: Path) -> None:
        # A folder that other users may read gets a copy, whose permissions can be changed.
        if not self._is_shared_folder:
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
                f"model checks need ONNX Runtime, which is not installed: {extras.installation_command('onnx')}"
            )
        now_s = self._clock()
        self._check = release, now_s + CHECK_S
        assert release.blob is not None
        current = self._disk.read_link(self.folder / CURRENT)
        self._energy = self._inference_j = None
        with disk_errors(f"empty {self._out}"):
            self._disk.clear_folder(self._out)
        model = self.folder / release.blob.sha256[:16] / MODEL
        split_model = self._parts_of_model(model.parent)
        request = CheckRequest(
            model=str(model if split_model is None else self._out / MODEL),
            current_model=None
            if current is None or not self._blob_sha256(current)
            else str(self.folder / current / MODEL),
            budget_bytes=self._budget_bytes(),
            data=self._settings.data,
            allowed_plugins=self._settings.plugins,
            timing_s=METERED_TIMING_S if _has_meter(self._board, now_s) else TIMING_S,
            split_model=split_model,
            input_shape=release.input_shape,
        )
        self._worker.start(request, now_s)

    def _parts_of_model(self, folder: Path) -> SplitModelFiles | None:
        shared = folder / SHARED
        with disk_errors(f"read {shared}"):
            task = personal_models.read_task(shared, self._disk) if self._disk.is_file(shared) else None
        if task is None:
            return None
        private_state = self._private_state(task.job)
        return SplitModelFiles(
            str(shared), self._settings.device, private_state.path, private_state.sha256, private_state.lost_reason
        )

    def poll_check(self) -> CheckResult | None:
        if self._check is None:
            return CheckResult("check was not started", {})
        (release, end_s), now_s = self._check, self._clock()
        if self._energy is not None:
            self._energy = self._energy.with_reading(now_s, self._board.read_sensors(now_s))
        for event in self._worker.poll_events(now_s):
            match event:
                case ProgressReport(fraction) if fraction == TIMING_STARTED:
                    self._energy = EnergyAccount(now_s).with_reading(now_s, self._board.read_sensors(now_s))
                case ProgressReport(fraction) if fraction == TIMING_ENDED and self._energy is not None:
                    energy = self._energy.with_reading(now_s, self._board.read_sensors(now_s))
                    self._inference_j, self._energy = energy.cost_until(now_s, None).energy_j, None
                case WorkResult():
                    self._end_check()  # also kills its child processes, so that its folders no longer change
                    verdict = judge_check(release.limits, event, self._inference_j)
                    return verdict if verdict.refusal_reason else self._store_assembled_model(release, verdict)
        if now_s > end_s:
            self._end_check()
            return CheckResult("check exceeded its time limit and was stopped", {})
        return None

    def _store_assembled_model(self, release: DesiredRelease, verdict: CheckResult) -> CheckResult:
        """Copy a model that the check has assembled from parts. Return `verdict`, or a refusal if it is unusable."""
        assert release.blob is not None
        folder, disk = self.folder / release.blob.sha256[:16], self._disk
        if not disk.is_file(folder / SHARED):
            return verdict
        part = folder / f"{MODEL}.part"
        try:
            with disk_errors(f"copy {self._out / MODEL} into {folder}", "free some space"):
                disk.remove(part)
                disk.copy_untrusted(self._out / MODEL, part, self._budget_bytes())  # no model exceeds the memory
                if self._is_shared_folder:
                    disk.set_mode(part, 0o640)
                disk.sync(part)
                self._check_graph(part)
                disk.replace(part, folder / MODEL)
                disk.sync(folder)
        except (ModelError, StoreError) as error:
            return CheckResult(f"output of the check cannot be used: {error}", {})
        self._forget_hashes(folder.name)
        return verdict

    def _end_check(self) -> None:
        self._check = None
        self._worker.close()

    def fds(self) -> Sequence[int]:
        return self._worker.fds()

    # -- exchange --

    def activate(self, release: DesiredRelease) -> None:
        assert release.blob is not None
        name, current = release.blob.sha256[:16], self._disk.read_link(self.folder / CURRENT)
        if current != name:
            if not self._disk.is_file(self.folder / name / MODEL):
                raise StoreError(f"model {self.folder / name} is missing: send the release again")
            status = self.runner.read_status()
            self._previous_status = status if status is not None and status.model == self._served_sha256() else None
            with disk_errors(f"activate the model in {self.folder}", "free some space"):
                self._disk.repoint_link(self.folder / PREVIOUS, NOTHING if current is None else current)
                self._disk.repoint_link(self.folder / CURRENT, name)
        self._min_gain = release.limits.min_gain
        self._start_observation_and_hook()

    def roll_back(self) -> bool:
        previous = self._disk.read_link(self.folder / PREVIOUS)
        if previous is None or (previous != NOTHING and not self._disk.is_file(self.folder / previous / MODEL)):
            return False
        with disk_errors(f"activate the previous model in {self.folder}", "free some space"):
            if previous == NOTHING:
                self._disk.unlink(self.folder / CURRENT)
                self._disk.sync(self.folder)
            elif previous != self._disk.read_link(self.folder / CURRENT):
                self._disk.repoint_link(self.folder / CURRENT, previous)
        self._previous_status = None
        self._start_observation_and_hook()
        return True

    def _start_observation_and_hook(self) -> None:
        self._first_status, self._activated_s = None, self._clock()
        self._label_progress = (0, self._activated_s)
        self._had_runner = self.runner.read_status() is not None and self.runner.unchanged_s <= MAX_RUNNER_SILENCE_S
        environment = {"FEDQUILT_MODELS": str(self.folder), "FEDQUILT_MODEL": str(self.folder / CURRENT / MODEL)}
        self._hook.start(environment)

    def is_settled(self) -> bool:
        return not self._hook.is_running and self._is_runner_up_to_date() and not self._awaits_labels()

    def _is_runner_up_to_date(self) -> bool:
        """Return whether the wait for the runner is over: model served, load time exceeded, or no runner."""
        status, model_sha256 = self.runner.read_status(), self._served_sha256()
        if status is None or not model_sha256:
            return True
        if status.model != model_sha256:
            return self._clock() > self._activated_s + RUNNER_RELOAD_S
        return self.runner.unchanged_s <= MAX_RUNNER_SILENCE_S

    def _awaits_labels(self) -> bool:
        status, now_s = self.runner.read_status(), self._clock()
        if status is None or status.model != self._served_sha256():
            return False
        if status.labelled != self._label_progress[0]:
            self._label_progress = (status.labelled, now_s)
        if now_s > min(self._label_progress[1] + LABEL_TIMEOUT_S, self._activated_s + MAX_LABEL_WAIT_S):
            return False
        return needs_more_labels(self._min_gain, self._previous_status, status)

    def unhealthy_reason(self) -> str:
        if failure := self._hook.failure:
            return failure
        name = self._disk.read_link(self.folder / CURRENT)
        if name is not None and not self._disk.is_file(self.folder / name / MODEL):
            return f"model file is missing in {self.folder / name}"
        return self._runner_failure()

    def _runner_failure(self) -> str:
        status = self.runner.read_status()
        if status is None:
            had_runner = self._had_runner or self._first_status is not None
            return "the model runner was silent with this model" if had_runner else ""
        if status.model != self._served_sha256():
            is_late = self._clock() > self._activated_s + RUNNER_RELOAD_S
            return "the model runner has not loaded this model and answers with another" if is_late else ""
        first_status = self._first_status
        # Smaller counts mean that the runner was restarted.
        if first_status is None or status.served < first_status.served or status.failed < first_status.failed:
            self._first_status = first_status = status if first_status is None else RunnerStatus(model=status.model)
        failures, answers = (
            status.failed - first_status.failed,
            status.failed - first_status.failed + status.served - first_status.served,
        )
        usual_failure_rate = first_status.failed / max(first_status.failed + first_status.served, 1)
        if failures < MIN_FAILURES or failures <= (MAX_FAILURE_INCREASE + usual_failure_rate) * answers:
            return accuracy_loss_reason(self._min_gain, self._previous_status, status)
        return f"the model runner failed {failures} of {answers} times with this model"

    def discard_unused(self) -> None:
        if self._check is not None:
            self._end_check()
        if not self._disk.is_dir(self.folder):
            return
        with disk_errors(f"delete old models in {self.folder}"):
            targets = {link: self._disk.read_link(self.folder / link) for link in (CURRENT, PREVIOUS)}
            if targets[PREVIOUS] is not None and targets[PREVIOUS] == (targets[CURRENT] or NOTHING):
                self._disk.unlink(self.folder / PREVIOUS)  # there is no previous model
            for entry in self._disk.entries(self.folder):
                if entry.is_dir and _NAME.match(entry.name) and entry.name not in targets.values():
                    self._disk.remove(self.folder / entry.name)
                    self._forget_hashes(entry.name)


def models_folder(settings: AgentSettings) -> Path:
    return Path(settings.models.folder or Path(settings.home) / "models").absolute()


def _has_meter(board: Device, now_s: float) -> bool:
    reading = board.read_sensors(now_s)
    return reading.energy_j is not None or reading.power_w is not None
