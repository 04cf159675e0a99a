"""The GPU bench, on the processor where there is no GPU: real tasks, a real bare loop."""

from __future__ import annotations

import pytest

from fedquilt.core import JobError
from fedquilt.tools.lab.bench import gpu
from fedquilt.tools.report.thresholds import format_figures

torch = pytest.importorskip("torch")


def test_tasks_are_timed_beside_a_bare_loop_and_their_memory_beside_its_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ratios are those of the printed rates and sizes."""
    monkeypatch.setattr(gpu, "SHORT", 1)
    monkeypatch.setattr(gpu, "LONG", 3)
    result = gpu.measure(("cnn",), device="cpu", turns=1)
    (row,) = result["rows"]
    assert result["figures"]["cnn_over_the_bare_loop"]["value"] == pytest.approx(row["ours"] / row["bare"], rel=0.01)
    assert result["figures"]["cnn_predicted_over_true"]["value"] == pytest.approx(
        row["predicted_mb"] / row["true_mb"], rel=0.01
    )
    assert 5 < row["true_mb"] < 400
    told = gpu.lines(result)
    assert told[2].split()[0] == "cnn"
    assert told[-3:] == format_figures(result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so() -> None:
    """Nothing is measured."""
    with pytest.raises(JobError, match="torch finds none here"):
        gpu.measure()
