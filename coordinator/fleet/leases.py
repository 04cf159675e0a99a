"""Leases of devices to jobs. A device works on one task at a time.

This module alone records which job uses a device. It also records for how long each job has leased devices, from which
fair-share scheduling follows.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

_NONE: Final[frozenset[str]] = frozenset()


class DeviceLeases:
    def __init__(self) -> None:
        self._holder: dict[str, str] = {}  # device -> job
        self._since_s: dict[str, float] = {}  # device -> when it was lent
        self._lent: dict[str, set[str]] = {}  # job -> devices
        self._begun_s: dict[str, float] = {}  # job -> sum of `_since_s` of its devices
        self._ended_s: dict[str, float] = {}  # job -> seconds of the loans that have ended

    def acquire_device(self, device: str, job: str, now_s: float) -> bool:
        holder = self._holder.get(device)
        if holder is None:
            self._holder[device], self._since_s[device] = job, now_s
            self._lent.setdefault(job, set()).add(device)
            self._begun_s[job] = self._begun_s.get(job, 0.0) + now_s
        return holder in (None, job)

    def release_device(self, device: str, job: str, now_s: float) -> bool:
        """End a job's lease of a device, if the job holds it. Return whether the device is free."""
        holder = self._holder.get(device)
        if holder != job:
            return holder is None
        del self._holder[device]
        since_s = self._since_s.pop(device)
        self._lent[job].remove(device)
        self._begun_s[job] -= since_s
        self._ended_s[job] = self._ended_s.get(job, 0.0) + now_s - since_s
        return True

    def leased_devices(self, job: str) -> AbstractSet[str]:
        return self._lent.get(job, _NONE)

    def devices_of_other_jobs(self, job: str) -> AbstractSet[str]:
        others = [devices for other, devices in self._lent.items() if devices and other != job]
        return others[0] if len(others) == 1 else _NONE.union(*others)

    def device_seconds(self, job: str, now_s: float) -> float:
        """Return the device seconds that a job has used, with those of running leases."""
        devices = self._lent.get(job)
        running_s = len(devices) * now_s - self._begun_s[job] if devices else 0.0
        return self._ended_s.get(job, 0.0) + running_s

    def raise_usage(self, job: str, least_s: float, now_s: float) -> None:
        """Raise the device seconds of a job to at least `least_s`."""
        lacking_s = least_s - self.device_seconds(job, now_s)
        if lacking_s > 0:
            self._ended_s[job] = self._ended_s.get(job, 0.0) + lacking_s

    def forget_job(self, job: str, now_s: float) -> None:
        for device in tuple(self.leased_devices(job)):
            self.release_device(device, job, now_s)
        for kept in (self._lent, self._begun_s, self._ended_s):
            kept.pop(job, None)
