"""Variants and result rows of an ablation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fedquilt.core import ClientContext, ClientResult, Method, Task, Tensors


def clear_between_tasks(method: Method) -> Method:
    """Return the method with device state and cache cleared before each task, except drawn images.

    That is part of the job; everything else they can find again. Their caches are empty at every task.
    """

    def work(task: Task, site: ClientContext) -> ClientResult:
        local: Tensors = {name: array for name, array in site.local.items() if name == "drawn"}
        with tempfile.TemporaryDirectory(prefix="fedquilt-") as cache:
            return method.work(task, replace(site, local=local, cache_at=Path(cache)))

    return replace(method, work=work)


@dataclass(frozen=True)
class SearchVariant:
    """A complete search with changed parameters or a changed method."""

    label: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the parameters
    double: Callable[[Method], Method] = lambda method: method  # what becomes of the method


BASE = {
    "mode": "default",
    "score_at": "hybrid",
    "weighted": True,
    "space_optimizer": True,
    "native_continuation": "allow",
    "join": True,
    "criterion": "cka",
    "completion": True,
}
VARIANTS = {
    "default": SearchVariant("stitched, default"),
    "no-optimizer": SearchVariant("  no space optimizer", {"space_optimizer": False}),
    "plain-vote": SearchVariant("  plain voting", {"weighted": False}),
    "labels": SearchVariant("  outputs judged by the labels' CKA", {"criterion": "labels"}),
    "residual": SearchVariant("  outputs judged by a ridge to labels", {"criterion": "residual"}),
    "all-blocks": SearchVariant("  every block voted on", {"completion": False}),
    "input": SearchVariant("  scored at input", {"score_at": "input"}),
    "output": SearchVariant("  scored at output", {"score_at": "output"}),
    "no-native": SearchVariant("  native next block excluded", {"native_continuation": "exclude"}),
    "no-join": SearchVariant("  each network with its own head", {"join": False}),
    "no-search": SearchVariant("  nothing stitched", {"expansions": 0}),
    "no-memo": SearchVariant("  nothing kept between tasks", double=clear_between_tasks),
    "paper": SearchVariant("  the paper's letter", {"mode": "paper"}),
}
COMPARISONS = ("alone", "unmodified", "self-stitched", "heads")
PARTS = (*VARIANTS, *COMPARISONS)
ALIGNED = ("paper", "unmodified")  # take donors whose classes are aligned with the labels


class AblationRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one network in one run. Values that only a search has are None elsewhere."""

    condition: str
    seed: int
    part: str
    name: str
    accuracy: float  # 0 to 1, on the test split
    tested: int  # examples of the test split
    wall_s: float  # of the whole run, evaluation included
    rounds: int | None = None
    task_s: float | None = None  # processor time of one device in one round, mean
    down_bytes: float | None = None  # to and from it, mean
    up_bytes: float | None = None
    scored: int | None = None  # blocks that a device which is asked in every round scores
    path: str = ""
