"""Protocol between the agent and a model's check: an order one way, then `Loaded`, `Progressed` and an `Outcome`."""

from __future__ import annotations

from typing import Any, Final

import msgspec

TIMED: Final = 0.5  # share that is told when the answers that are timed begin,
DONE: Final = 0.75  # and when they have ended; `Outcome.examples` is their number


class Parted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files of a network that is put together on this board: `fedquilt.personal`."""

    shared: str  # file of what was sent
    device: str
    private: str | None = None  # file of what this board has kept of the run; None: nothing, or nothing of use
    private_sha256: str = ""  # of that file
    lost: str = ""  # why there is none of use, although rounds have left one
    mode: int = 0o600  # permissions of the network's file


class CheckOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model, and what is measured of it."""

    model: str  # file
    before: str | None  # file of what runs now; None: nothing
    budget_bytes: int
    data: dict[str, Any]  # fedquilt.data.spec.DataSpec; {}: this device has none
    plugins: tuple[str, ...] | None = None  # packages that this board allows: `fedquilt.plugins.restrict`
    timed_s: float = 1.0  # seconds of answers one after the other, of which the median is the latency
    trtexec: str | None = None  # program that builds a TensorRT engine; None: there is none
    trtexec_s: float = 0.0  # most that it may take
    parted: Parted | None = None  # what the model's file is made of first; None: it is there
    engine: str = "onnx"
