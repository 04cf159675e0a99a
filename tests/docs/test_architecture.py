"""docs/architecture.md: its files and functions exist, and its layers and diagram are those of the code."""

import ast
import re

import documents
from fedquilt.formats import toml

PAGE = "docs/architecture.md"
TEXT = (documents.ROOT / PAGE).read_text()
MOST_WORDS = 1500
FOLDERS = ("coordinator", "edge_agent", "fedquilt", "models", "profiles", "tools")


def test_a_newcomer_reads_it_in_ten_minutes():
    assert len(TEXT.split()) <= MOST_WORDS


def test_the_diagram_of_a_job_is_the_tables():
    (found,) = documents.blocks(PAGE, "mermaid")
    assert found.strip() == documents.format_mermaid_diagram()


def test_the_layers_are_the_contracts():
    contracts = toml.read_toml(documents.ROOT / "pyproject.toml")["tool"]["importlinter"]["contracts"]
    layers = [each["layers"] for each in contracts if each["type"] == "layers"]
    found = [block.splitlines() for block in documents.blocks(PAGE, "layers")]
    assert found == [[re.sub(r"fedquilt\.(coordinator\.)?", "", row) for row in rows] for rows in layers]


def test_every_path_that_it_names_is_there():
    for name in re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", TEXT):
        assert (documents.ROOT / name).exists(), name


def test_every_function_that_it_names_is_there():
    members = known_members()
    named = re.findall(r"`(?!fedquilt\.)([A-Za-z_]+)\.(?!py`)([A-Za-z_]+)`", TEXT)
    assert len(named) > 30
    assert [f"{owner}.{name}" for owner, name in named if name not in members.get(owner, ())] == []


def test_its_tree_has_every_folder():
    (tree,) = (block for block in re.findall(r"^```\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL) if "core/" in block)
    top = [path for path in documents.ROOT.iterdir() if (path / "__init__.py").exists()]
    below = [path for path in (documents.ROOT / "fedquilt").iterdir() if (path / "__init__.py").exists()]
    assert [path.name for path in top + below if f"{path.name}/" not in tree] == []


def known_members() -> dict[str, set[str]]:
    """The names that each class, module and package of the product defines or imports."""
    found: dict[str, set[str]] = {}
    for path in (path for folder in FOLDERS for path in (documents.ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        owner = path.parent.name if path.stem == "__init__" else path.stem
        found.setdefault(owner, set()).update(defined_names(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(defined_names(node))
    return found


def defined_names(owner: ast.Module | ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for node in owner.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
            case ast.ImportFrom(names=imported):
                names.update(each.asname or each.name for each in imported)
    return names
