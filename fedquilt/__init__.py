"""fedquilt: federated learning on edge devices.

    import fedquilt as fq

    job = fq.Job(method="fedavg", model=fq.models.mlp(64, [32], 10), data=fq.Data("digits.npz"), fleet=fq.Fleet(4))
    run = fq.simulate(job)
    run.rounds().to_pandas()

Public names are loaded on first use, because an agent on a device imports this package too.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedquilt import models as models
    from fedquilt.api import Cohort as Cohort
    from fedquilt.api import Comparison, Data, Fleet, Job, Run, Table, compare, method, simulate
    from fedquilt.core import (
        ClockError,
        DataError,
        FedquiltError,
        Hooks,
        JobError,
        LinkError,
        MemoryBudgetError,
        ModelError,
        StoreError,
        UpdateError,
        WireError,
    )
    from fedquilt.methods import fedavg as fedavg

__version__ = "0.1.0"

__all__ = [
    "ClockError",
    "Cohort",
    "Comparison",
    "Data",
    "DataError",
    "FedquiltError",
    "Fleet",
    "Hooks",
    "Job",
    "JobError",
    "LinkError",
    "MemoryBudgetError",
    "ModelError",
    "Run",
    "StoreError",
    "Table",
    "UpdateError",
    "WireError",
    "__version__",
    "compare",
    "fedavg",
    "method",
    "models",
    "simulate",
]


def __getattr__(name: str) -> object:
    """Load a public name (PEP 562)."""
    if name not in __all__:
        # without an object, Python's own traceback does not add a second "Did you mean"; a notebook's adds none at all
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_suggest_name(name)}", name=name, obj=None)
    import importlib

    if name == "models":
        return importlib.import_module(f"{__name__}.models")
    if name == "fedavg":
        return importlib.import_module(f"{__name__}.methods.fedavg")
    home = "core" if name == "Hooks" or name.endswith("Error") else "api"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def _suggest_name(name: str) -> str:
    import difflib

    known = {each.lower(): each for each in __all__}
    found = difflib.get_close_matches(name.lower(), known, 1)
    return f"; did you mean {known[found[0]]!r}?" if found else ""


def __dir__() -> list[str]:
    return list(__all__)
