"""The wheels of fedquilt itself: the same files, the same bytes; and on a board, no more than it runs."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from msgspec import structs
from processes import make_job

import fedquilt
from fedquilt import profiles
from fedquilt.cli import commands
from fedquilt.formats import toml
from fedquilt.tools.boards.flash import own_wheels
from fedquilt.tools.boards.flash.own_wheels import OwnWheel
from fedquilt.tools.boards.flash.wheels import Wheel
from fedquilt.tools.broker import EmbeddedBroker

BOARD_MOST = 620_000  # bytes of the wheel for boards, which each upgrade sends to each board
VERBS = ["model", "doctor", "agent", "board", "identity"]
ELSEWHERE = {  # commands of operators, which say on a board that they need the whole package
    "fedquilt.cli.board": {"fedquilt.cli.flash"},
    "fedquilt.cli.home_access": {
        "fedquilt.coordinator",
        "fedquilt.coordinator.settings",
        "fedquilt.coordinator.storage.store",
        "fedquilt.coordinator.views",
        "fedquilt.coordinator.views.scores",
    },
    "fedquilt.cli.identity": {"fedquilt.tools.identity", "fedquilt.tools.identity.commands"},
    "fedquilt.cli.model": {
        "fedquilt.coordinator.views",
        "fedquilt.coordinator.views.scores",
        "fedquilt.tools.artefacts.export",
        "fedquilt.tools.experiments",
        "fedquilt.tools.experiments.evaluation",
    },
    "fedquilt.cli.options": {
        "fedquilt.coordinator.delivery.blob_server",
        "fedquilt.coordinator.storage.store",
    },
    "fedquilt.tools.boards.doctor": {"fedquilt.tools.boards.doctor.checks.coordinator"},
}


@pytest.mark.parametrize("name", ["fedquilt", "fedquilt-board"])
def test_an_own_wheel_is_whole_and_always_the_same(
    tmp_path: Path, name: OwnWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports from where it is unpacked, with nothing compiled."""
    monkeypatch.setattr(own_wheels, "strip_prose", own_wheels.strip_prose.__wrapped__)  # anew for each wheel
    (tmp_path / "again").mkdir()
    path = own_wheels.build_own_wheel(tmp_path, name)
    assert own_wheels.build_own_wheel(tmp_path / "again", name).read_bytes() == path.read_bytes()
    read, info = Wheel.from_file(path), f"{name.replace('-', '_')}-{fedquilt.__version__}.dist-info"
    assert (read.name, read.version) == (name, fedquilt.__version__)
    assert any(line.startswith("msgspec") for line in read.requires)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
        record = archive.read(f"{info}/RECORD").decode()
    assert {line.split(",")[0] for line in record.splitlines()} == set(names)
    assert {file.split("/")[0] for file in names} == {"fedquilt", info}
    assert not [file for file in names if file.endswith(".pyc") or "__pycache__" in file]
    assert {"fedquilt/edge_agent/agent.py", "fedquilt/py.typed"} <= set(names)
    assert ("fedquilt/tools/boards/flash/units/fedquilt-agent.service" in names) == (name == "fedquilt")
    ran = subprocess.run(
        [sys.executable, "-c", "import fedquilt.edge_agent.agent as a, fedquilt.cli; print(a.__file__)"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.startswith(str(tmp_path / "site")), ran.stderr


@pytest.fixture(scope="module")
def board_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for boards."""
    return own_wheels.build_own_wheel(tmp_path_factory.mktemp("wheel"))


def modules(wheel: Path) -> dict[str, str]:
    """Return the sources of a wheel's modules by name."""
    with zipfile.ZipFile(wheel) as archive:
        files = {file: archive.read(file).decode() for file in archive.namelist() if file.endswith(".py")}
    return {file[:-3].removesuffix("/__init__").replace("/", "."): source for file, source in files.items()}


def imported(source: str) -> set[str]:
    """Return the modules of fedquilt that a source imports anywhere, except for type checkers."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{each.name}" for each in node.names}
            found |= {node.module, *(name for name in inner if name.startswith("fedquilt.") and is_module(name))}
        waiting += ast.iter_child_nodes(node)
    return {name for name in found if name.split(".")[0] == "fedquilt"}


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module, and no package
        return False


def test_a_board_gets_what_it_runs_and_no_more(board_wheel: Path) -> None:
    """Every import of its modules is there; no coordinator, simulation, bench, demo or dashboard is."""
    there = modules(board_wheel)
    missing = {name: imported(source) - there.keys() for name, source in there.items()}
    assert {name: lacks for name, lacks in missing.items() if lacks} == ELSEWHERE
    parts = {".".join(name.split(".")[1:3]) for name in there}
    assert {part for part in parts if part.startswith("tools.")} == {
        "tools.artefacts",
        "tools.boards",
        "tools.operations",
        "tools.simulation",
    }
    assert not {name.split(".")[1] for name in there if "." in name} & {"api", "coordinator", "testing"}
    assert board_wheel.stat().st_size <= BOARD_MOST


def test_each_file_for_boards_exists() -> None:
    """A file that was renamed leaves no name in the lists."""
    package = Path(fedquilt.__file__).parent
    for file in (*own_wheels.BOARD_FILES, *own_wheels.NOT_ON_BOARDS):
        assert (package / file).exists(), file


class ProseRemover(ast.NodeTransformer):
    """Removal of docstrings and of one-line annotations in functions, but not of those of classes in them.

    Attributes:
        cut: Lines from which annotations were removed.
    """

    def __init__(self) -> None:
        self.cut: set[int] = set()
        self._in_function = False

    def visit(self, node: ast.AST) -> ast.AST:
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.arg) and self._is_cut(node.annotation):
            node.annotation = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and self._is_cut(node.returns):
            node.returns = None
        if isinstance(node, ast.AnnAssign) and self._in_function and node.value is not None and node.simple:
            node = (
                ast.copy_location(ast.Assign([node.target], node.value), node)
                if self._is_cut(node.annotation)
                else node
            )
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            first = node.body.pop(0)
            if not node.body and not isinstance(node, ast.Module):
                node.body = [ast.copy_location(ast.Pass(), first)]
        outside = self._in_function
        self._in_function = function or (outside and not isinstance(node, ast.ClassDef))
        self.generic_visit(node)
        self._in_function = outside
        return node

    def _is_cut(self, annotation: ast.expr | None) -> bool:
        if annotation is None or annotation.lineno != annotation.end_lineno:
            return False
        self.cut.add(annotation.lineno)
        return True


def places(tree: ast.AST, cut: set[int]) -> list[tuple[int, int | None]]:
    """Return the line of each node, and its column on lines without a cut."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
    return [(node.lineno, None if node.lineno in cut else node.col_offset) for node in nodes]


def test_files_on_boards_have_the_code_of_the_clone_at_the_same_places(board_wheel: Path) -> None:
    """A traceback of a board fits the sources. The commands keep their docstrings, which are their help."""
    package = Path(fedquilt.__file__).parents[1]
    for name, source in modules(board_wheel).items():
        path = package / name.replace(".", "/")
        original = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        if name.startswith("fedquilt.cli"):
            assert source == original
        else:
            remover, found = ProseRemover(), ast.parse(source)
            wanted = remover.visit(ast.parse(original))
            if not re.search(r"annotation=(?!None)|returns=(?!None)", ast.dump(wanted)):
                wanted.body = [each for each in wanted.body if ast.unparse(each) != own_wheels.POSTPONED]
            assert ast.dump(found) == ast.dump(wanted), name
            assert places(found, remover.cut) == places(wanted, remover.cut), name


def test_profiles_on_boards_have_the_numbers_of_the_clone(board_wheel: Path) -> None:
    """Without the texts on where the numbers come from."""
    with zipfile.ZipFile(board_wheel) as archive:
        found = {
            Path(name).stem: profiles.parse_board_profile(archive.read(name).decode(), name)
            for name in archive.namelist()
            if name.endswith(".toml")
        }
    assert sorted(found) == profiles.board_names()
    for name, profile in found.items():
        assert {source.text for source in profile.sources.values()} == {"see package fedquilt"}
        own = profiles.load_board_profile(name)
        sources = {key: structs.replace(each, text=own.sources[key].text) for key, each in profile.sources.items()}
        assert structs.replace(profile, sources=sources) == own


def test_annotations_of_classes_stay() -> None:
    """They are read at run time, those of functions are not."""
    source = "def f(a: int, *b: str) -> list[int]:\n    c: int = a\n    class D:\n        e: int = 1\n    return c\n"
    stripped = "def f(a, *b):\n    c = a\n    class D:\n        e: int = 1\n    return c\n"
    assert own_wheels.strip_prose(source) == stripped


@pytest.mark.parametrize(
    ("source", "stripped"),
    [
        ("async def f(a: int) -> int:\n    b: int = a\n    return b\n", "async def f(a):\n    b = a\n    return b\n"),
        ("def f(a: (int | None)) -> (int):\n    b: ((int)) = a\n", "def f(a):\n    b = a\n"),
        ("def f() -> (\n    int\n):\n    pass\n", "def f() -> (\n    int\n):\n    pass\n"),
    ],
)
def test_annotations_of_functions_are_cut_with_their_parentheses(source: str, stripped: str) -> None:
    """Of asynchronous functions too. Those over several lines stay."""
    assert own_wheels.strip_prose(source) == stripped


@pytest.fixture(scope="module")
def program(board_wheel: Path) -> Path:
    """`fedquilt` of a fresh environment with the wheel for boards, and the other packages of this one."""
    folder = board_wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--disable-pip-version-check", str(board_wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if (Path(path) / "msgspec").is_dir() or (Path(path) / "numpy").is_dir()]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    return folder / "bin/fedquilt"


def run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *words], capture_output=True, text=True, cwd=program.parent, check=False)


def test_a_board_has_the_commands_of_a_board(program: Path, tmp_path: Path) -> None:
    """The others are not in its help, and what needs a coordinator says so."""
    shown = run(program, "--help").stdout.splitlines()
    assert [name for name in VERBS if any(line.startswith(f"  {name} ") for line in shown)] == VERBS
    there = {name for names in commands.SECTIONS.values() for name in names}
    assert not [name for name in there - set(VERBS) if any(line.startswith(f"  {name} ") for line in shown)]
    assert run(program, "agent", "--help").stdout.startswith("Usage: fedquilt agent")
    refused = run(program, "doctor", "--home", str(tmp_path))
    assert refused.returncode == 2
    assert "is not installed: pip install 'fedquilt'" in refused.stderr


def test_an_agent_of_a_board_is_examined_and_takes_part_in_rounds(program: Path, tmp_path: Path) -> None:
    """Over a broker on loopback, with a coordinator of the whole package."""
    plan = make_job(tmp_path, start_devices=1)
    table = {**plan.make_agent_tables()[0], "home": str(tmp_path / "agent")}
    settings, log = tmp_path / "agent.toml", tmp_path / "agent.log"
    with EmbeddedBroker() as broker, log.open("wb") as out:
        settings.write_text(toml.format_toml({**table, "broker": {"url": broker.url}}))
        found = run(program, "doctor", str(settings), "--format", "json")
        assert found.returncode in (0, 10, 11), found.stderr
        assert "FQ001" not in found.stdout
        assert "FQ002" not in found.stdout
        checked = run(program, "agent", str(settings), "--check")
        assert checked.returncode == 0, checked.stderr
        agent = subprocess.Popen([program, "agent", settings], cwd=tmp_path, stdout=out, stderr=out)
        try:
            words = ["run", str(tmp_path / "job.toml"), "--home", str(tmp_path / "runs"), "--broker", broker.url]
            done = subprocess.run([sys.executable, "-m", "fedquilt.cli", *words], capture_output=True, timeout=300)
            assert done.returncode == 0, (done.stderr.decode(), log.read_text())
        finally:
            agent.kill()
            agent.wait()
