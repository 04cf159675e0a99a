"""Sources of examples for a runner: files of a folder, and pictures of a camera."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fedquilt import extras
from fedquilt.core import DataError, FedquiltError
from fedquilt.host.disk import REAL
from fedquilt.tools.operations.runner.service import BODY_MOST, ModelService

LOOK_S: Final = 0.2
STILL_S: Final = 1.0  # since the last change of a file that cannot be read yet: it may be half written
CAMERA_TRIES: Final = 20  # pictures in a row that a camera may fail to give

Say = Callable[[str], None]


class FolderSource:
    """Source that classifies the present and future files of a folder, and prints lines of JSON.

    Args:
        service: Service that classifies.
        folder: Watched folder, without its subfolders.
        say: Function that prints a line.
        clock: Clock in seconds since 1970, equal to that of the disk.

    Raises:
        DataError: If the folder does not exist.
    """

    def __init__(self, service: ModelService, folder: Path, say: Say, clock: Callable[[], float] = time.time) -> None:
        if not folder.is_dir():
            raise DataError(f"{folder} is no folder: name a folder in which files with examples appear")
        self._service, self._folder, self._say, self._clock = service, folder, say, clock
        self._done: dict[str, tuple[int, int, int]] = {}  # of files that are there still

    def classify_new(self) -> None:
        try:
            found = {each.name: each for each in REAL.entries(self._folder) if not each.is_dir}
        except OSError as error:
            raise DataError(f"cannot look into {self._folder}: {error.strerror}") from None
        self._done = {name: known for name, known in self._done.items() if name in found}
        for name in sorted(found):
            file = found[name]
            known = (file.inode, file.size, file.mtime_ns)
            if self._done.get(name) == known or Path(name).suffix.lower() not in self._service.file_suffixes:
                continue
            try:
                if file.size > BODY_MOST:
                    raise DataError(f"{file.size} bytes: at most {BODY_MOST} are read")
                told = self._service.classify_bytes(REAL.read(self._folder / name))
            except (FedquiltError, OSError) as error:
                if abs(self._clock() - file.mtime_ns / 1e9) < STILL_S:
                    continue  # it is looked at again
                told = {"error": str(error)}
            self._done[name] = known
            self._say(json.dumps({"file": name, **told}))


class CameraSource:
    """Source that classifies pictures of a camera, and prints lines of JSON.

    Args:
        service: Service that classifies.
        device: Path of the camera, such as /dev/video0.
        every_s: Seconds between two pictures.
        say: Function that prints a line.

    Raises:
        JobError: If OpenCV is not installed.
        DataError: If the camera is missing or gives no pictures, or the network takes no images.
    """

    def __init__(self, service: ModelService, device: str, every_s: float, say: Say) -> None:
        cv2: Any = extras.load_optional("cv2")
        self._cv2, self._service, self._device, self._every_s, self._say = cv2, service, device, every_s, say
        self._camera = cv2.VideoCapture(device)
        if not self._camera.isOpened():
            raise DataError(f"cannot open the camera {device}: is it there, and may this user read it (group video)?")
        self._due_s, self._missed = 0.0, 0

    def classify_new(self) -> None:
        there = self._camera.grab()  # always: else the camera's queue holds old pictures
        if time.monotonic() < self._due_s:
            return
        fine, frame = self._camera.retrieve() if there else (False, None)
        if not fine:
            self._missed += 1
            if self._missed >= CAMERA_TRIES:
                raise DataError(f"the camera {self._device} gives no pictures any more")
            return
        self._missed, self._due_s = 0, time.monotonic() + self._every_s
        grey = (self._service.image_settings or {}).get("channels") == 1
        x = self._cv2.cvtColor(frame, self._cv2.COLOR_BGR2GRAY if grey else self._cv2.COLOR_BGR2RGB)
        try:
            told = self._service.classify_stored(x[None])[0].to_dict()
        except FedquiltError as error:
            told = {"error": str(error)}
        self._say(json.dumps({"at": time.time(), **told}))

    def close(self) -> None:
        self._camera.release()
