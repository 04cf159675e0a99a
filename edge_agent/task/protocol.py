"""What the daemon and a task's process say to each other: orders one way, how it goes and an outcome the other."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fedquilt.core import BlobRef, Task


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task, with where things are on this device."""

    task: Task
    device: str
    budget_bytes: int
    data: dict[str, Any]  # fedquilt.data.spec.DataSpec
    bundles: dict[str, str]  # bundle name -> file
    private: str | None  # file of the job's private state; None: none yet
    cache: str  # folder of the job's own, made where it is missing: what earlier tasks left there for later ones
    out: str  # folder: bundles go into files named by their sha256, private state into private.safetensors
    plan_bytes: int | None = None  # of the budget, what the engine may plan with; None: all of it
    prefix: str = ""  # what the names of these files begin with, where devices share the folder
    whole_bytes: int = 0  # bundles that are no larger come with the outcome, and into no file
    plugins: tuple[str, ...] | None = None  # the packages that this board allows: `fedquilt.plugins.restrict`


class Loaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="loaded"):
    """The device's data is there; the work begins. How many examples it has decides how much that is."""

    examples: int  # held-out ones aside


class Progressed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="progress"):
    """How far it is, 0 to 1."""

    fraction: float


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="outcome"):
    """How a task ended; with a code other than "ok" only `reason` and what it took mean anything."""

    code: Literal["ok", "memory", "data", "engine", "method", "model", "disk", "failed"] = "ok"
    reason: str = ""
    weight: float = 0.0
    metrics: dict[str, float] = {}
    bundles: dict[str, BlobRef] = {}
    layouts: dict[str, dict[str, str]] = {}  # of these: `fedquilt.tensors.layout`
    blobs: dict[str, bytes] = {}  # of these, by sha256: what is in no file
    examples: int = 0  # the device's own, held-out ones aside
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int | None = None
    base_bytes: int | None = None
    planned_bytes: int | None = None  # what its engine expected it to hold at its peak, beside `base_bytes`
    overrun: bool = False  # memory ran out at work; with code "memory" and not this, an engine refused beforehand
    killed: bool = False  # from outside, not for what it did itself: the same order may go well the next time


Event = Loaded | Progressed | Outcome
