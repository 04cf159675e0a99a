"""What a task's process says of work that failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import plain
import pytest

from fedquilt.core import JobError, WorkEstimate
from fedquilt.edge_agent.task import main
from fedquilt.edge_agent.task.protocol import WorkRequest
from fedquilt.methods import fedavg


def raised(by: Callable[[], object]) -> Exception:
    try:
        by()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_in_a_method_from_outside_names_its_file_and_line() -> None:
    broken = lambda: {}["mu"]  # noqa: E731
    outcome, line = main.failure_outcome(raised(broken)), broken.__code__.co_firstlineno
    assert (outcome.code, outcome.reason) == ("exception", f"KeyError: 'mu' ({Path(__file__).name}, line {line})")


def test_an_error_without_words_is_named_by_its_kind() -> None:
    def fail() -> None:
        raise ValueError

    assert main.failure_outcome(raised(fail)).reason.startswith(f"ValueError ({Path(__file__).name}, line ")


def test_a_method_whose_work_returns_no_answer_is_told_so(tmp_path: Path) -> None:
    method = replace(fedavg.METHOD, work=lambda task, site: None)  # type: ignore[arg-type,return-value]
    task = plain.task(method="prox:METHOD", work=WorkEstimate(flops=1.0))
    order = WorkRequest(
        task=task, device="a", budget_bytes=1 << 30, data={}, bundles={}, private=None, cache="", out=str(tmp_path)
    )
    with pytest.raises(JobError, match="`work` of method 'prox:METHOD' returned NoneType, and a fedquilt"):
        main.run_method(order, method, SimpleNamespace(lost=""))  # type: ignore[arg-type]
