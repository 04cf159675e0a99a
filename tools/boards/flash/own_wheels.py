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
import tokenize
import zipfile
from collections.abc import Iterator, Sequence
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
    *("__init__.py", "py.typed", "extras.py", "metrics.py", "open_metrics.py", "plugins.py", "systemd.py", "wire.py"),
    *("arrays/", "blobs/", "compression/", "console/", "core/", "costs/", "data/", "edge_agent/", "formats/", "host/"),
    *("methods/", "models/", "onnx/", "profiles/", "security/", "transport/"),
    *("cli/__init__.py", "cli/__main__.py", "cli/commands.py", "cli/entry.py", "cli/home_access.py"),
    *("cli/options.py", "cli/agent.py", "cli/agent_process.py", "cli/board.py", "cli/clocks.py", "cli/record.py"),
    *(
        "cli/doctor.py",
        "cli/identity.py",
        "cli/model.py",
        "tools/__init__.py",
        "tools/artefacts/__init__.py",
        "tools/artefacts/classifier.py",
    ),
    *("tools/boards/__init__.py", "tools/boards/clocks.py", "tools/boards/doctor/"),
    *("tools/boards/enrol.py", "tools/boards/record/", "tools/boards/targets.py", "tools/operations/__init__.py"),
    *("tools/operations/access_control.py", "tools/operations/runner/", "tools/simulation/__init__.py"),
    "tools/simulation/task_process.py",
)
# what these folders have for coordinators and simulations
NOT_ON_BOARDS: Final = (
    *("data/compatibility.py", "data/inspection/", "data/measured_settings.py", "formats/job_bundle.py"),
    *("edge_agent/engines/batch_training.py", "edge_agent/engines/numpy/batch_engine.py"),
    *("edge_agent/engines/torch/batch_engine.py", "models/networks/onnx_file.py"),
    "models/partial/dependency_trace.py",
    *("models/stitching/onnx/", "profiles/board_layouts.py", "profiles/fake_trees.py"),
    *("tools/boards/doctor/checks/coordinator.py", "transport/memory_link.py", "transport/scheduler.py"),
)
SOURCE_TEXT: Final = 'text = "see package fedquilt"'  # of a number of a profile on boards
_SOURCE_TEXT: Final = re.compile(rb'^text = ".*"$', re.MULTILINE)
POSTPONED: Final = "from __future__ import annotations"
STAMP: Final = (2020, 1, 1, 0, 0, 0)  # of every file


def build_own_wheel(folder: Path, name: OwnWheel = "fedquilt-board") -> Path:
    """Build a wheel of the running files, and return its path.

    Raises:
        StoreError: If the folder cannot be written.
    """
    package, stem = Path(fedquilt.__file__).parent, f"{name.replace('-', '_')}-{fedquilt.__version__}"
    info = f"{stem}.dist-info"
    files = dict(_iterate_package_files(package) if name == "fedquilt" else _iterate_board_files(package))
    files[f"{info}/METADATA"] = "".join(f"{key}: {value}\n" for key, value in read_metadata(name)).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: fedquilt\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nfedquilt = fedquilt.cli:main\n"
    record = "".join(f"{name},sha256={_urlsafe_sha256(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for file, data in files.items():
            entry = zipfile.ZipInfo(file, STAMP)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
    path = folder / f"{stem}-py3-none-any.whl"
    with disk_errors(f"write {path}"):
        path.write_bytes(made.getvalue())
    return path


def read_metadata(name: OwnWheel) -> list[tuple[str, str]]:
    """Return the fields of a wheel's METADATA, from pyproject.toml in a clone and else from the installed package."""
    # pyproject.toml comes first, because the metadata of an editable installation may be outdated
    clone = Path(fedquilt.__file__).parents[1]
    said = [("Metadata-Version", "2.1"), ("Name", name), ("Version", fedquilt.__version__)]
    if not (clone / "pyproject.toml").is_file():
        known = metadata.metadata("fedquilt")
        keys = ("Requires-Python", "Requires-Dist", "Provides-Extra")
        said += [(key, value) for key in keys for value in known.get_all(key) or ()]
    else:
        from packaging.requirements import Requirement

        project = toml.read_toml(clone / "pyproject.toml")["project"]
        said.append(("Requires-Python", project["requires-python"]))
        said += [("Requires-Dist", line) for line in project["dependencies"]]
        for extra, lines in project["optional-dependencies"].items():
            said.append(("Provides-Extra", extra))
            for one in map(Requirement, lines):
                marker = f"({one.marker}) and " if one.marker else ""
                one.marker = None
                said.append(("Requires-Dist", f'{one}; {marker}extra == "{extra}"'))
    return said if name == "fedquilt" else [field for field in said if _is_for_boards(field)]


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
        yield name, data if is_help or not file.endswith(".py") else strip_prose(data.decode()).encode()


def _is_below(file: str, places: Sequence[str]) -> bool:
    return any(file == place or (place.endswith("/") and file.startswith(place)) for place in places)


def strip_prose(source: str) -> str:
    """Return a module without docstrings, comments and annotations in functions. Each statement keeps its line.

    A module without any annotation left does not import their postponed evaluation.
    """
    tree = ast.parse(source)
    lines = _cut_annotations(source.splitlines(), tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body and ast.get_docstring(node, clean=False) is not None else None
        if first is not None and not lines[first.lineno - 1][: first.col_offset].strip():
            lines[first.lineno - 1 : first.end_lineno] = [""] * ((first.end_lineno or first.lineno) - first.lineno + 1)
            if len(node.body) == 1 and not isinstance(node, ast.Module):
                lines[first.lineno - 1] = " " * first.col_offset + "pass"
    text = "\n".join(lines) + "\n"
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]].rstrip()
    if POSTPONED in lines and not any(map(_is_annotated, ast.walk(ast.parse(text)))):
        lines[lines.index(POSTPONED)] = ""
    return "\n".join(lines) + "\n"


def _is_annotated(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) or any(getattr(node, key, None) for key in ("annotation", "returns"))


def _cut_annotations(lines: Sequence[str], tree: ast.AST) -> list[str]:
    left = [line.encode() for line in lines]  # positions in a tree count bytes
    for line, start, end in sorted(_find_annotations(tree), reverse=True):
        before, after = left[line - 1][:start].rstrip(), left[line - 1][end:]
        while before.endswith(b"(") and after.lstrip().startswith(b")"):  # no part of the annotation in the tree
            before, after = before[:-1].rstrip(), after.lstrip()[1:]
        if before.endswith((b":", b"->")):  # or a parenthesis begins on an earlier line
            left[line - 1] = before.rstrip(b"->: ") + after
    return [line.decode() for line in left]


def _find_annotations(node: ast.AST, *, in_function: bool = False) -> Iterator[tuple[int, int, int]]:
    """Yield line, start and end of annotations in functions. Those of classes are read at run time."""
    for child in ast.iter_child_nodes(node):
        annotation: ast.expr | None = None
        if isinstance(child, ast.arg):
            annotation = child.annotation
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            annotation = child.returns
        elif isinstance(child, ast.AnnAssign) and in_function and child.value is not None and child.simple:
            annotation = child.annotation
        if annotation is not None and annotation.lineno == annotation.end_lineno:
            yield annotation.lineno, annotation.col_offset, annotation.end_col_offset or 0
        inside = not isinstance(child, ast.ClassDef) and (
            in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        yield from _find_annotations(child, in_function=inside)


def _urlsafe_sha256(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
