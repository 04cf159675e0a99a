"""Limits for all jobs of a coordinator: limits.toml in its home."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fedquilt.console import units
from fedquilt.core import JobError, Name, SiteRight
from fedquilt.formats import toml
from fedquilt.host import http_server

FILE: Final = "limits.toml"


class SubmitterLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    running: Annotated[int, Meta(ge=1)] = 8  # jobs at once
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0  # largest share of the boards online that its jobs have at a time


class RetentionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Retention of ended runs: [retention].

    A run is deleted only if all rules that are set select the run. Without a rule no run is deleted.
    """

    keep: Annotated[int, Meta(ge=0)] | None = None
    older_than: str | None = None  # since the end of a run

    @property
    def older_than_s(self) -> float | None:
        """Value of `older_than` in seconds, or None.

        Raises:
            JobError: If `older_than` is no duration.
        """
        if self.older_than is None:
            return None
        try:
            return units.parse_seconds(self.older_than)
        except ValueError as error:
            raise JobError(f"[retention] older_than = {error}") from None


class CoordinatorLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    running: Annotated[int, Meta(ge=1)] = 8  # jobs at once
    submitter: SubmitterLimits = SubmitterLimits()
    retention: RetentionSettings = RetentionSettings()
    sites: dict[Name, SiteRight] = {}  # of a fleet without certificates, which say it elsewhere: [sites.NAME]
    http: http_server.ConnectionLimits = http_server.ConnectionLimits()  # of the server of blobs, and of the dashboard
    waiting_mb: Annotated[int, Meta(ge=1)] = 800  # of large updates that are sent, or are here and not folded yet


def load_limits(home: Path) -> CoordinatorLimits:
    """Return the limits of a home's limits.toml, or the defaults without the file.

    Raises:
        JobError: If the file cannot be read, or has an unknown key or a value out of range.
    """
    path = home / FILE
    if not path.exists():
        return CoordinatorLimits()
    with toml.prefix_errors(str(path)):
        found: CoordinatorLimits = toml.convert_table(
            toml.read_toml(path), CoordinatorLimits, "a coordinator's settings"
        )
        _ = found.retention.older_than_s
        _require_disjoint_sites(found.sites)
    return found


def _require_disjoint_sites(sites: Mapping[str, SiteRight]) -> None:
    """Raise JobError if two sites may both submit updates of one board."""
    for (one, right), (other, another) in itertools.combinations(sites.items(), 2):
        if right.overlaps(another):
            raise JobError(f"[sites]: {one} and {other} may both speak for one board: give each board to one site")
