"""fedquilt: federated learning on edge devices.

    import fedquilt as fq

    job = fq.Job(method="fedavg", model=fq.models.mlp(64, [32], 10), data=fq.Data("digits.npz"), fleet=fq.Fleet(4))
    run = fq.simulate(job)
    run.rounds().to_pandas()

Public names are loaded on first use, because an agent on a device imports this package too.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedquilt import models as models
    from fedquilt.api.comparison import Comparison, compare
    from fedquilt.api.job import Cohort, Data, Fleet, Job, method
    from fedquilt.api.run import Run, Table
    from fedquilt.api.simulation import simulate
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


# names that are modules, and modules with other names; the rest is in `fedquilt.core`
_MODULES = {"fedavg": "methods.fedavg", "models": "models"}
_HOMES = {
    **dict.fromkeys(("Cohort", "Data", "Fleet", "Job", "method"), "api.job"),
    **dict.fromkeys(("Comparison", "compare"), "api.comparison"),
    **dict.fromkeys(("Run", "Table"), "api.run"),
    "simulate": "api.simulation",
}


def __getattr__(name: str) -> object:
    """Import and return a public name (PEP 562), or raise AttributeError with the nearest name."""
    if name not in __all__:
        nearest = ""
        if not any(os.path.exists(f"{__path__[0]}/{file}") for file in (name, f"{name}.py")):  # not yet imported
            from fedquilt.formats import toml

            nearest = toml.suggest_nearest(name, __all__)
        # without an object, Python's own traceback does not add a second "Did you mean"; a notebook's adds none at all
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest}", name=name, obj=None)
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'core')}"), name)


def __dir__() -> list[str]:
    return list(__all__)
