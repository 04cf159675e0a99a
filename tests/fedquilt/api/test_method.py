"""fq.method: a method made of another."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

import fedquilt as fq
from fedquilt.core import Method


@dataclass(frozen=True)
class Params(fq.fedavg.Params):
    mu: float = 0.1


class Loose:
    mu = 0.1


def pulled(gradient: Any, value: Any, at: Mapping[str, Any]) -> Any:
    return gradient + 0.1 * (value - at["start"])


def work(task: Any, client: Any) -> Any:
    return fq.fedavg.work(task, client, fq.Hooks(correct_gradient=pulled))


def test_parts_that_are_given_replace_those_of_the_base():
    made = fq.method(fq.fedavg, params=Params, work=work, paper="...")
    assert isinstance(made, Method)
    assert (made.params, made.work, made.paper) == (Params, work, "...")
    assert made.aggregation is fq.fedavg.METHOD.aggregation
    assert fq.method(made, paper="other").work is work


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"wrk": work}, r"a method has no field 'wrk'; did you mean 'work'\? There are: paper, "),
        ({"params": Loose}, r"params = .*Loose.* is not a frozen dataclass"),
        ({"params": Params()}, r"is not a frozen dataclass: write @dataclass"),
    ],
)
def test_a_wrong_part_is_named(parts, said):
    with pytest.raises(fq.JobError, match=said):
        fq.method(fq.fedavg, **parts)


def test_a_base_has_to_be_a_method():
    with pytest.raises(fq.JobError, match=r"'fedquilt.models' is not a method"):
        fq.method(fq.models)


# -- as the method of a job -----------------------------------------------------------------------


def test_a_job_takes_a_method_that_a_module_holds(tmp_path, monkeypatch):
    (tmp_path / "held_method.py").write_text(
        "import fedquilt as fq\n"
        "METHOD = fq.method(fq.fedavg, paper='held')\n"
        "OTHER = fq.method(fq.fedavg, paper='other')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    held = importlib.import_module("held_method")
    assert fq.Job(method=held.METHOD).method == "held_method:METHOD"
    assert fq.Job(method=held).method == "held_method:METHOD"
    assert fq.Job(method="fedavg").replace(method=held.OTHER).method == "held_method:OTHER"
    assert fq.Job(method=fq.fedavg).method == "fedavg"
    assert fq.Job(method=fq.fedavg.METHOD).method == "fedavg"


def test_a_method_that_no_other_process_could_import_is_refused():
    with pytest.raises(fq.JobError, match=r"move it to a file mine\.py as METHOD = "):
        fq.Job(method=fq.method(fq.fedavg, work=work))
    with pytest.raises(fq.JobError, match=r"method = 3: must be text in quotes"):
        fq.Job(method=3)
