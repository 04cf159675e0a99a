"""Messages between the agent and the process of a model check."""

from __future__ import annotations

from typing import Any, Final

import msgspec

TIMED: Final = 0.5  # progress at which the timed answers begin
TENSORRT: Final = "model.engine"  # file in `CheckRequest.out`
TENSORRT_S: Final = 1200.0  # most for the building of a TensorRT engine
DONE: Final = 0.75  # progress at which the timed answers have ended; `WorkResult.examples` is their number


class SplitModelFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files from which a network is assembled on this device, see `fedquilt.formats.personal_models`."""

    shared: str  # file that the coordinator sent
    device: str
    private: str | None = None  # file of the private state of the run; None: none, or none of use
    private_sha256: str = ""  # of the file `private`
    lost: str = ""  # reason why the private state that rounds have left is of no use


class CheckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str  # file; one that is made of parts is in `out`
    out: str  # folder for what the check makes: the model of parts, and a TensorRT engine
    before: str | None  # file of the model in use; None: there is none
    budget_bytes: int
    data: dict[str, Any]  # fedquilt.data.spec.DataSpec; {}: this device has none
    plugins: tuple[str, ...] | None = None  # packages that this board allows: `fedquilt.plugins.restrict_plugins`
    timed_s: float = 1.0  # seconds of answers one after the other, of which the median is the latency
    trtexec: str | None = None  # program that builds a TensorRT engine; None: there is none
    parted: SplitModelFiles | None = None  # files to make the model of first; None: the model was sent whole
    engine: str = "onnx"
    input_shape: tuple[int, ...] | None = None  # of one example; None: as the graph declares it
