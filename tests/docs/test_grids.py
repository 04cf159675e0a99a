"""The page on grids: its example is one, and it names every key that there is."""

import re
from pathlib import Path

import pytest

from fedquilt.coordinator import settings
from fedquilt.tools.lab.papers import grid

PAGE = (Path(__file__).parents[2] / "docs" / "grids.md").read_text()


def test_the_example_is_a_grid_whose_jobs_are_right(tmp_path):
    text = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "momentum.toml").write_text(text[1])
    found = grid.read_tables(tmp_path / "momentum.toml")["momentum"].fill_marks(None)
    jobs = [
        settings.parse_job(found.make_job(points, row, 0, None))
        for points in found.columns.values()
        for row in found.rows.values()
    ]
    assert [job.params.get("momentum") for job in jobs] == [None, 0.9, None, 0.9]
    assert [job.data["partition"] for job in jobs] == ["iid", "iid", "dirichlet", "dirichlet"]
    assert list(found.columns) == ["even", "odd"]


@pytest.mark.parametrize(
    "kind", [grid.Grid, grid.GridRow, grid.AxisPoint, grid.PretrainSettings, grid.ClaimSpec, grid.GridColumn]
)
def test_every_key_is_named(kind):
    missing = [name for name in kind.__struct_fields__ if not re.search(rf"\b{name}\b", PAGE)]
    assert not missing
