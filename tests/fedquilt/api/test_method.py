"""fq.method: a method made of another."""

from __future__ import annotations

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
    return fq.fedavg.work(task, client, fq.Hooks(correct=pulled))


def test_parts_that_are_given_replace_those_of_the_base() -> None:
    """All others are the base's; a module of methods or a method serves as one."""
    made = fq.method(fq.fedavg, params=Params, work=work, paper="...")
    assert isinstance(made, Method)
    assert (made.params, made.work, made.paper) == (Params, work, "...")
    assert made.fold is fq.fedavg.fold
    assert fq.method(made, paper="other").work is work


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"wrk": work}, r"a method has no part 'wrk'; there are: paper, .*did you mean 'work'\?"),
        ({"params": Loose}, r"params = .*Loose.*: a frozen dataclass is wanted"),
        ({"params": Params()}, r"a frozen dataclass is wanted"),
    ],
)
def test_a_wrong_part_is_named(parts: dict[str, Any], said: str) -> None:
    """Where it is written, not when it is run."""
    with pytest.raises(fq.JobError, match=said):
        fq.method(fq.fedavg, **parts)


def test_a_base_has_to_be_a_method() -> None:
    """A module without one is refused."""
    with pytest.raises(fq.JobError, match=r"'fedquilt.models' is no method"):
        fq.method(fq.models)
