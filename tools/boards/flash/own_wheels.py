"""Wheels of the running files: `fedquilt`, and `fedquilt-board` for devices.

Both contain the package `fedquilt`, so an environment gets one of them. The same files give the same bytes.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import os
import re
import zipfile
from collections.abc import Iterator, Sequence, Set
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, TypeAlias

import fedquilt
from fedquilt.extras import BOARD_EXTRAS
from fedquilt.formats import toml
from fedquilt.host.disk import disk_errors

OwnWheel: TypeAlias = Literal["fedquilt", "fedquilt-board"]

# folders and files of the package on boards; `fedquilt --help` lists the verbs that are there
BOARD_FILES: Final = (
    *("__init__.py", "extras.py", "metrics.py", "metrics_endpoint.py", "plugins.py", "systemd.py", "wire.py"),
    *("arrays/", "blobs/", "compression.py", "console/", "core/", "costs/", "data/", "edge_agent/", "formats/"),
    *("host/", "methods/", "models/", "onnx/", "profiles/", "security/", "transport/"),
    *("cli/__init__.py", "cli/__main__.py", "cli/commands.py", "cli/entry.py"),
    *("cli/options.py", "cli/agent.py", "cli/board.py", "cli/identity.py", "cli/model.py"),
    *("tools/__init__.py", "tools/artefacts/__init__.py", "tools/artefacts/predictions.py"),
    *("tools/artefacts/predictor.py", "tools/boards/__init__.py", "tools/boards/clocks.py", "tools/boards/doctor/"),
    *("tools/boards/enrol.py", "tools/boards/record/", "tools/boards/targets.py", "tools/operations/__init__.py"),
    *("tools/operations/access_control.py", "tools/operations/inference_server/", "tools/simulation/__init__.py"),
    "tools/simulation/task_process.py",
)
# what these folders have for coordinators and simulations
NOT_ON_BOARDS: Final = (
    *("data/compatibility.py", "data/inspection.py", "formats/job_bundle.py"),
    *("edge_agent/engines/batch_training.py", "edge_agent/engines/torch/batch_engine.py"),
    *("models/networks/mlp_graph.py", "models/networks/onnx_file.py", "models/networks/onnx_scaling.py"),
    "models/partial/dependency_trace.py",
    *("models/stitching/onnx/", "models/stitching/search/ranking.py"),
    *("tools/boards/doctor/coordinator.py", "transport/memory_link.py"),
)
SOURCE_TEXT: Final = 'text = "see package fedquilt"'  # short text of sources in the profiles of boards
_SOURCE_TEXT: Final = re.compile(rb'^text = ".*"$', re.MULTILINE)
TIMESTAMP: Final = (2020, 1, 1, 0, 0, 0)  # of all files


def build_own_wheel(folder: Path, name: OwnWheel = "fedquilt-board") -> Path:
    package_folder, stem = Path(fedquilt.__file__).parent, f"{name.replace('-', '_')}-{fedquilt.__version__}"
    info_folder = f"{stem}.dist-info"
    files = dict(_iterate_package_files(package_folder) if name == "fedquilt" else _iterate_board_files(package_folder))
    files[f"{info_folder}/METADATA"] = "".join(f"{key}: {value}\n" for key, value in read_metadata(name)).encode()
    files[f"{info_folder}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: fedquilt\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info_folder}/entry_points.txt"] = b"[console_scripts]\nfedquilt = fedquilt.cli:main\n"
    record = "".join(f"{name},sha256={_urlsafe_sha256(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info_folder}/RECORD"] = f"{record}{info_folder}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for file, data in files.items():
            entry = zipfile.ZipInfo(file, TIMESTAMP)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
    path = folder / f"{stem}-py3-none-any.whl"
    with disk_errors(f"write {path}"):
        path.write_bytes(buffer.getvalue())
    return path


def read_metadata(name: OwnWheel) -> list[tuple[str, str]]:
    """Return the fields of a wheel's METADATA, from a clone's pyproject.toml or the installed package."""
    # pyproject.toml comes first, because the metadata of an editable installation may be outdated
    repository = Path(fedquilt.__file__).parents[1]
    fields = [("Metadata-Version", "2.1"), ("Name", name), ("Version", fedquilt.__version__)]
    if not (repository / "pyproject.toml").is_file():
        installed_metadata = metadata.metadata("fedquilt")
        keys = ("Requires-Python", "Requires-Dist", "Provides-Extra")
        fields += [(key, value) for key in keys for value in installed_metadata.get_all(key) or ()]
    else:
        from packaging.requirements import Requirement

        project = toml.read_toml(repository / "pyproject.toml")["project"]
        fields.append(("Requires-Python", project["requires-python"]))
        fields += [("Requires-Dist", line) for line in project["dependencies"]]
        for extra, lines in project["optional-dependencies"].items():
            fields.append(("Provides-Extra", extra))
            for requirement in map(Requirement, lines):
                marker = f"({requirement.marker}) and " if requirement.marker else ""
                requirement.marker = None
                fields.append(("Requires-Dist", f'{requirement}; {marker}extra == "{extra}"'))
    return fields if name == "fedquilt" else [field for field in fields if _is_for_boards(field)]


def _is_for_boards(field: tuple[str, str]) -> bool:
    extra = field[1] if field[0] == "Provides-Extra" else (re.findall(r"extra == [\"']([\w-]+)", field[1]) or [""])[0]
    return not extra or extra in BOARD_EXTRAS


def _iterate_package_files(package: Path) -> Iterator[tuple[str, bytes]]:
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and not name.endswith((".pyc", "~", ".orig", ".rej")):
                path = Path(folder, name)
                yield f"fedquilt/{path.relative_to(package).as_posix()}", path.read_bytes()


def _iterate_board_files(package: Path) -> Iterator[tuple[str, bytes]]:
    for name, data in _iterate_package_files(package):
        file = name.removeprefix("fedquilt/")
        if not _is_below(file, BOARD_FILES) or _is_below(file, NOT_ON_BOARDS):
            continue
        if file.startswith("profiles/") and file.endswith(".toml"):
            yield name, _SOURCE_TEXT.sub(SOURCE_TEXT.encode(), data)
            continue
        is_help = file.startswith("cli/")  # a verb's docstring is its help
        if not is_help and file.endswith(".py"):
            data = strip_prose(data.decode()).encode()
        if data:  # a package with only a docstring needs no file
            yield name, data


def _is_below(file: str, paths: Sequence[str]) -> bool:
    return any(file == path or (path.endswith("/") and file.startswith(path)) for path in paths)


def strip_prose(source: str) -> str:
    """Return a module's code without docstrings, comments, annotations and imports for annotations.

    Indentation is one space instead of four.
    """
    tree = ast.parse(source)
    used_names = _find_used_names(tree)
    tree = ast.fix_missing_locations(_ProseRemover().visit(tree))
    remover = _ImportRemover(used_names - _find_used_names(tree), any(map(_is_annotated, ast.walk(tree))))
    text = ast.unparse(remover.visit(tree))
    if '"""' in text or "'''" in text:  # lines of a string may begin with spaces
        return text
    return re.sub("^(?: {4})+", lambda match: " " * (len(match[0]) // 4), text, flags=re.MULTILINE)


class _ProseRemover(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            node.body = body or ([] if isinstance(node, ast.Module) else [ast.Pass()])
        if not isinstance(node, ast.ClassDef):
            return super().generic_visit(node)
        fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
        node.body = [statement if statement in fields else self.visit(statement) for statement in node.body]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return node if node.value is None else ast.Assign([node.target], self.visit(node.value))

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


class _ImportRemover(ast.NodeTransformer):
    """Removal of imports that only the removed annotations used.

    Args:
        unused: Names that the remaining code does not use.
        postponed: Whether to keep imports from `__future__`, because annotations are left.
    """

    def __init__(self, unused: Set[str], postponed: bool) -> None:
        self._unused, self._postponed = unused, postponed

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        node.names = [alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) not in self._unused]
        return node if node.names else None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        if node.module == "__future__":
            return node if self._postponed else None
        node.names = [alias for alias in node.names if (alias.asname or alias.name) not in self._unused]
        return node if node.names else None


def _find_used_names(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return names.union(*(re.findall(r"\w+", text) for text in texts))


def _is_annotated(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) or any(getattr(node, key, None) for key in ("annotation", "returns"))


def _urlsafe_sha256(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
