"""Parameters of a rollout, and their validation."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from fedquilt import labels, onnx_format, wire
from fedquilt.core import BlobRef, JobError, Label, Seconds

_WINDOW: Final = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")

Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    kind: wire.Kind
    name: Label  # what people call it: the run, or the version
    blob: BlobRef | None = None
    select: tuple[str, ...] = ()  # of boards, by labels as [cohort] select has them
    canary: Share = 0.05  # of the boards that are there
    phases: tuple[Share, ...] = (0.25, 1.0)  # of them, by and by; 1.0 are all that are known, and those that come later
    abort_above: Share = 0.1  # share of the boards that have answered, above which it is undone
    patience_s: Seconds = 600.0  # for which a board that says nothing holds up the next phase
    limits: wire.Limits = wire.Limits()
    input_shape: wire.InputShape | None = None  # of one example of a model; None: as its graph declares it
    versions: onnx_format.Versions | None = None  # of a model that is a file; fedquilt's own are for every runtime
    soak_s: Seconds = 60.0
    window: Label = ""
    force: bool = False
    settings: dict[Label, Any] = {}

    @property
    def cumulative_shares(self) -> tuple[float, ...]:
        """Cumulative share of the fleet after each step, beginning with the canary."""
        return (self.canary, *self.phases)

    @property
    def includes_all_devices(self) -> bool:
        """Whether the last phase covers all devices, including those that join later."""
        return self.phases[-1] >= 1.0

    def require_valid(self) -> None:
        """Raise JobError, with the fix, if the selection, the phases or the window are invalid."""
        labels.require_selection(self.select)
        if not self.canary or not self.phases:
            raise JobError("a rollout has a canary above 0 % and at least one phase after it: --canary 5% --phases 100")
        if any(
            later <= before for before, later in zip(self.cumulative_shares, self.cumulative_shares[1:], strict=False)
        ):
            told = ", ".join(f"{100 * share:g} %" for share in self.cumulative_shares)
            raise JobError(f"the phases {told} do not grow: each is the share of the fleet that has it by its end")
        if self.window and not _WINDOW.fullmatch(self.window):
            raise JobError(f"{self.window[:40]!r} is no window: write it as 02:00-05:00, in the boards' local time")
        if self.window and self.window[:5] == self.window[6:]:
            raise JobError(f"the window {self.window} begins when it ends")
