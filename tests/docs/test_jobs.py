"""The page of what a job file holds names every key that there is, and no default that is not."""

import re
from pathlib import Path

import msgspec
import pytest

from fedquilt.coordinator import settings
from fedquilt.coordinator.privacy_settings import PrivacySettings
from fedquilt.core import Encoding, SiteRight
from fedquilt.data import inputs
from fedquilt.data.spec import DataSpec
from fedquilt.host import http_server
from fedquilt.tools.artefacts import prepare

PAGE = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()


def section(heading: str) -> str:
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    return next(part for part in parts if heading in part.partition("\n")[0])


@pytest.mark.parametrize(
    ("kind", "heading", "prefix"),
    [
        (settings.CohortSettings, "[cohort]", ""),
        (Encoding, "[wire]", "wire."),
        (settings.JobLimits, "[stop]", "stop."),
        (settings.StalenessSettings, "[cohort]", "staleness."),
        (settings.EvaluationSettings, "[check]", "check."),
        (settings.PersonalSettings, "[personal]", "personal."),
        (PrivacySettings, "[privacy]", "privacy."),
        (settings.CoordinatorLimits, "How a round goes", ""),
        (settings.SubmitterLimits, "How a round goes", "submitter."),
        (settings.RetentionSettings, "How a round goes", "retention."),
        (http_server.ConnectionLimits, "How a round goes", "http."),
        (settings.FleetSettings, "[fleet]", ""),
        (DataSpec, "[data]", ""),
        (prepare.DonorSettings, "[[donors]]", ""),
        (inputs.ImageInput, "[model]", ""),
        (inputs.ValueInput, "[model]", ""),
    ],
)
def test_every_key_has_its_row(kind, heading, prefix):
    text = section(heading)
    for field in msgspec.structs.fields(kind):
        assert f"`{prefix}{field.name}`" in text, field.name
        rows = [line for line in text.splitlines() if line.startswith(f"| `{prefix}{field.name}` |")]
        if rows and isinstance(field.default, int | float) and field.default and not isinstance(field.default, bool):
            assert f"| {field.default:g} |" in rows[0]


def test_the_jobs_own_keys_and_tables_are_all_there():
    for field in msgspec.structs.fields(settings.JobSettings):
        told = (f"| `{field.name}` |", f"`[{field.name}]`", f"`[[{field.name}]]`", f"`[{field.name}.")
        assert any(each in PAGE for each in told), field.name


def test_the_networks_are_those_there_are():
    zoo = pytest.importorskip("fedquilt.models.networks.registry", reason="networks are torch's")
    for name in (*zoo.ARCHITECTURES, "resnet20-cifar", "torchvision/<architecture>"):
        assert f"`{name}`" in section("[model]"), name


def test_no_key_is_told_that_is_not_there():
    kinds = (
        settings.JobSettings,
        settings.CohortSettings,
        settings.FleetSettings,
        DataSpec,
        prepare.DonorSettings,
        inputs.ImageInput,
    )
    known = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
    known |= {field.name for field in msgspec.structs.fields(settings.CoordinatorLimits)}
    tables = {
        "submitter": settings.SubmitterLimits,
        "retention": settings.RetentionSettings,
        "http": http_server.ConnectionLimits,
        "sites.NAME": SiteRight,
    }
    for table, kind in {
        **tables,
        "wire": Encoding,
        "stop": settings.JobLimits,
        "check": settings.EvaluationSettings,
        "staleness": settings.StalenessSettings,
        "personal": settings.PersonalSettings,
        "privacy": PrivacySettings,
        "trigger": settings.DriftTrigger,
    }.items():
        known |= {f"{table}.{field.name}" for field in msgspec.structs.fields(kind)}
    zoo = pytest.importorskip("fedquilt.models.networks.registry", reason="networks are torch's")
    known |= {*zoo.ARCHITECTURES, "resnet20-cifar", "torchvision/<architecture>"}
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    told = {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}
    assert len(told) > 50
    assert not told - known
