"""The page on data: its tables are read as a job reads them, and no key of a kind of data is left out."""

import re
from pathlib import Path

import msgspec
import pytest

from fedquilt import methods, metrics
from fedquilt.coordinator import settings
from fedquilt.data.spec import HOW, Audio, DataSpec, Text, Windows
from fedquilt.formats import toml

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_table_on_the_page_is_one_that_a_job_takes(block):
    job = settings.parse_job({"name": "j", "method": "fedavg", **toml.parse_toml(block, "docs/data.md")})
    DataSpec.parse(job.data)
    if job.model:
        pytest.importorskip("torch")
        from fedquilt.models.networks import registry

        registry.build_network(job.model)


def test_every_key_of_a_kind_of_data_is_on_the_page():
    for key in HOW:
        assert f"`{key}`" in PAGE or f"[data.{key}]" in PAGE, key
    for kind in (Audio, Text, Windows):
        for field in msgspec.structs.fields(kind):
            assert re.search(rf"`{field.name}`|^{field.name} =", PAGE, re.MULTILINE), field.name
    for task in metrics.TASKS:
        assert f'`"{task}"`' in PAGE
    for metric in metrics.METRICS.values():
        assert metric.title.lower() in PAGE.lower(), metric.title


def test_every_example_named_on_the_page_is_there():
    for link in re.findall(r"\]\(\.\./(examples/[^)]+)\)", PAGE):
        assert (Path(__file__).parents[2] / link).exists(), link


def test_the_methods_that_need_classes_are_those_on_the_page():
    found = re.search(r"Some methods need one class .*?\.", PAGE, re.DOTALL)
    wanted = [
        name for name in methods.builtin_names() if "regression" not in methods.load(name).traits.prediction_tasks
    ]
    assert re.findall(r"`(\w+)`", found[0]) == wanted
