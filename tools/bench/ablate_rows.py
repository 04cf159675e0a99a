"""What an ablation plays: searches with one part changed, what they are compared with, and a row for each network."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fedquilt.core import Answer, Method, Site, Task, Tensors


def forgetful(method: Method) -> Method:
    """The method on devices that keep nothing from one task to the next, but for which images they have drawn.

    That is part of the job; everything else they can find again. Their caches are empty at every task.
    """

    def work(task: Task, site: Site) -> Answer:
        local: Tensors = {name: array for name, array in site.local.items() if name == "drawn"}
        with tempfile.TemporaryDirectory(prefix="fedquilt-") as cache:
            return method.work(task, replace(site, local=local, cache_at=Path(cache)))

    return replace(method, work=work)


@dataclass(frozen=True)
class Variant:
    """A whole search, and what is different in it."""

    label: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the parameters
    double: Callable[[Method], Method] = lambda method: method  # what becomes of the method


BASE = {
    "mode": "default",
    "score_at": "hybrid",
    "weighted": True,
    "space_optimizer": True,
    "native_continuation": "allow",
}
VARIANTS = {
    "default": Variant("stitched, default"),
    "no-optimizer": Variant("  no space optimizer", {"space_optimizer": False}),
    "plain-vote": Variant("  plain voting", {"weighted": False}),
    "input": Variant("  scored at input", {"score_at": "input"}),
    "output": Variant("  scored at output", {"score_at": "output"}),
    "no-native": Variant("  native next block excluded", {"native_continuation": "exclude"}),
    "no-memo": Variant("  nothing kept between tasks", double=forgetful),
    "paper": Variant("  the paper's letter", {"mode": "paper"}),
}
COMPARISONS = ("alone", "unmodified", "self-stitched", "heads")
PARTS = (*VARIANTS, *COMPARISONS)
ALIGNED = ("paper", "unmodified")  # take donors whose classes are aligned with the labels


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one network of one run came to. What only a search has is None for the others."""

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
