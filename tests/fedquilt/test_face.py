"""The public face: which names there are, that each is documented, and that importing it is light."""

from __future__ import annotations

import inspect
import subprocess
import sys
import traceback
from types import ModuleType

import pytest

import fedquilt as fq
from fedquilt.core import FedquiltError

NAMES = {
    *("Job", "Data", "Cohort", "Fleet", "models", "simulate", "compare", "Run", "Comparison", "Table"),
    *("Hooks", "method", "fedavg", "__version__"),
    *("FedquiltError", "JobError", "DataError", "ModelError", "LinkError", "StoreError"),
    *("MemoryBudgetError", "ClockError", "UpdateError", "WireError"),
}


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_public_names_are_these():
    assert set(fq.__all__) == NAMES
    assert len(fq.__all__) == len(NAMES)
    assert sorted(fq.__all__) == list(fq.__all__)
    assert dir(fq) == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_each_public_name_says_what_it_is(name):
    found = getattr(fq, name)
    assert inspect.getdoc(found)
    if inspect.isclass(found):
        for own, member in vars(found).items():
            if not own.startswith("_") and (callable(member) or isinstance(member, property | classmethod)):
                assert inspect.getdoc(getattr(found, own)), f"{name}.{own}"
    if name == "models":
        assert all(inspect.getdoc(getattr(found, builder)) for builder in found.__all__)


def test_nothing_else_is_public_but_the_packages_parts():
    code = "import fedquilt\nfor name in fedquilt.__all__: getattr(fedquilt, name)\nprint(*vars(fedquilt))"
    public = {name for name in python(code).split() if not name.startswith("_")}
    odd = public - NAMES - {"TYPE_CHECKING"}
    parts = {name for name in odd if isinstance(getattr(fq, name, sys.modules.get(f"fedquilt.{name}")), ModuleType)}
    assert odd == parts, "loaded names other than submodules"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("COHORT", "Cohort"), ("DataEror", "DataError"), ("xyzzy", "")],
)
def test_an_unknown_name_is_answered_with_the_nearest(typed, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(fq, typed)
    hint = f"; did you mean {meant!r}?" if meant else ""
    assert str(caught.value) == f"module 'fedquilt' has no attribute {typed!r}{hint}"
    assert "Did you mean" not in "".join(traceback.format_exception(caught.value))


def test_importing_loads_nothing():
    before = set(python("import sys; print(*sys.modules)").split())
    loaded = set(python("import sys, fedquilt, fedquilt.api; print(*sys.modules)").split()) - before
    assert {name.split(".")[0] for name in loaded} <= {"fedquilt", *sys.stdlib_module_names}
    assert {name for name in loaded if name.startswith("fedquilt")} == {"fedquilt", "fedquilt.api"}


def test_describing_a_job_needs_neither_torch_nor_onnxruntime():
    code = (
        "import sys, fedquilt as fq\n"
        "fq.Job(method='fedavg', model=fq.models.mlp(64, [32], 10), data=fq.Data('d.npz'), fleet=fq.Fleet(3))\n"
        "fq.simulate, fq.compare, fq.Run, fq.fedavg\n"
        "print(*sys.modules)"
    )
    loaded = {name.split(".")[0] for name in python(code).split()}
    assert not loaded & {"torch", "torchvision", "onnx", "onnxruntime", "pandas", "polars", "IPython", "matplotlib"}


def test_models_alone_need_not_even_numpy():
    loaded = python("import sys, fedquilt as fq; fq.models.mlp(64, [32], 10); print(*sys.modules)").split()
    assert "numpy" not in loaded
    assert "msgspec" not in loaded


def test_the_errors_are_fedquilts():
    kinds = [getattr(fq, name) for name in fq.__all__ if name.endswith("Error")]
    assert all(issubclass(kind, FedquiltError) for kind in kinds)
