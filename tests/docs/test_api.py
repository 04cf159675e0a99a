"""docs/api.md and examples/README.md name everything that there is."""

import re

import documents
import fedquilt


def test_the_reference_has_every_public_name():
    text = (documents.ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"^::: fedquilt\.(\w+)$", text, re.MULTILINE)) | {"__version__"}
    assert "fedquilt.__version__" in text
    assert named == set(fedquilt.__all__)


def test_every_example_is_listed():
    text = (documents.ROOT / "examples" / "README.md").read_text()
    linked = {path.split("/")[0] for path in re.findall(r"\]\(([\w./-]+)\)", text)}
    for path in (documents.ROOT / "examples").iterdir():
        tracked = path.suffix in (".py", ".ipynb") or (path.is_dir() and (path / "job.toml").exists())
        assert not tracked or path.name in linked, path.name
