"""The wheels of fedquilt itself: the same files, the same bytes; and on a board, no more than it runs."""

from __future__ import annotations

import ast
import dis
import importlib.util
import subprocess
import sys
import zipfile
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType

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

BOARD_MOST = 576_000  # bytes of the wheel for boards, which each upgrade sends to each board
VERBS = ["model", "doctor", "agent", "board", "identity"]
ELSEWHERE = {  # imported by functions that only coordinators and operators call
    "fedquilt.cli.options": {
        "fedquilt.coordinator.delivery.blob_server",
        "fedquilt.coordinator.storage.store",
    },
    "fedquilt.methods.fedstitch": {"fedquilt.models.stitching.search.ranking"},
    "fedquilt.tools.boards.doctor": {"fedquilt.tools.boards.doctor.coordinator"},
}


@pytest.mark.parametrize("name", ["fedquilt", "fedquilt-board"])
def test_an_own_wheel_is_whole_and_always_the_same(tmp_path: Path, name: OwnWheel) -> None:
    path = own_wheels.build_own_wheel(tmp_path, name)
    (tmp_path / "again").mkdir()
    again = own_wheels.build_own_wheel.__wrapped__(tmp_path / "again", name)
    assert again.read_bytes() == path.read_bytes()
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
    assert "fedquilt/edge_agent/agent.py" in names
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
    return own_wheels.build_own_wheel(tmp_path_factory.mktemp("wheel"))


def modules(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        files = {file: archive.read(file).decode() for file in archive.namelist() if file.endswith(".py")}
    return {file[:-3].removesuffix("/__init__").replace("/", "."): source for file, source in files.items()}


def imported(source: str) -> set[str]:
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


def parents(module: str) -> list[str]:
    return [".".join(module.split(".")[:count]) for count in range(1, module.count(".") + 1)]


def bound_names(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import() | ast.ImportFrom():
                found |= {each.asname or each.name.split(".")[0] for each in node.names}
            case ast.FunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
    return found


def test_names_that_modules_of_a_board_import_from_each_other_are_there(board_wheel: Path) -> None:
    there = modules(board_wheel)
    bound = {name: bound_names(source) for name, source in there.items() if name != "fedquilt"}
    for name, source in there.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module in bound:
                lacks = {each.name for each in node.names} - bound[node.module]
                assert not {each for each in lacks if f"{node.module}.{each}" not in there}, (name, node.module)


def test_a_board_gets_what_it_runs_and_no_more(board_wheel: Path) -> None:
    there = modules(board_wheel)
    there = {parent: "" for name in there for parent in parents(name)} | there
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
    package = Path(fedquilt.__file__).parent
    for file in (*own_wheels.BOARD_FILES, *own_wheels.NOT_ON_BOARDS):
        assert (package / file).exists(), file


def leaf_functions(source: str) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    waiting = [compile(source, "module", "exec", optimize=2)]
    while waiting:
        code = waiting.pop()
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        waiting += inner
        if not inner and code.co_flags & CO_NEWLOCALS:
            steps = [
                step.argrepr for step in dis.get_instructions(code) if step.opname.startswith(("BINARY", "COMPARE"))
            ]
            found.setdefault(code.co_name, []).append((steps, code.co_varnames, code.co_names))
    return found


def test_functions_on_boards_are_those_of_the_clone(board_wheel: Path) -> None:
    package, compared = Path(fedquilt.__file__).parents[1], 0
    for name, source in modules(board_wheel).items():
        path = package / name.replace(".", "/")
        original = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        if name.startswith("fedquilt.cli"):
            assert source == original
            continue
        wanted = leaf_functions(original)
        assert leaf_functions(source) == wanted, name
        compared += len(wanted)
    assert compared > 1000


def test_profiles_on_boards_have_the_numbers_of_the_clone(board_wheel: Path) -> None:
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


@pytest.mark.parametrize(
    ("source", "stripped"),
    [
        ("async def f(a: int, *b: (str)) -> int:\n    c: int = a", "async def f(a, *b):\n c = a"),
        (
            '"""Prose."""\nMOST: Final = 1  # why\ndef f() -> (\n    int\n):\n    """Prose."""',
            "MOST = 1\n\ndef f():\n pass",
        ),
        ("def f():\n    class D:\n        e: int = 1", "def f():\n\n class D:\n  e: int = 1"),
        ("if TYPE_CHECKING:\n    from a import B\nimport c.d, e\nx: B = c.d", "import c.d, e\nx = c.d"),
        ("if TYPE_CHECKING:\n    x = 1\nelse:\n    x = 2", "x = 2"),
        ("from a import B, C\nx: C = 1\ny: dict[str, 'B'] = f('B')", "from a import B\nx = 1\ny = f('B')"),
        (
            "from __future__ import annotations\nclass A:\n    b: C",
            "from __future__ import annotations\n\nclass A:\n b: C",
        ),
        ("from __future__ import annotations\ndef f(a: B): ...", "def f(a):\n ..."),
        ('x = 1\ndef f():\n    """"""\n    "a\\n    b"', 'x = 1\n\ndef f():\n    """a\n    b"""'),
    ],
)
def test_only_annotations_of_fields_stay(source: str, stripped: str) -> None:
    assert own_wheels.strip_prose(source).splitlines() == stripped.splitlines()


@pytest.fixture(scope="module")
def program(board_wheel: Path) -> Path:
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
    shown = run(program, "--help").stdout.splitlines()
    assert [name for name in VERBS if any(line.startswith(f"  {name} ") for line in shown)] == VERBS
    there = {name for names in commands.SECTIONS.values() for name in names}
    assert not [name for name in there - set(VERBS) if any(line.startswith(f"  {name} ") for line in shown)]
    assert run(program, "agent", "--help").stdout.startswith("Usage: fedquilt agent")
    for group, verbs in (("model", {"run", "serve"}), ("identity", {"enrol", "request", "accept"})):
        named = run(program, group, "--help").stdout.partition("Verbs:")[2].splitlines()
        assert {
            line.split()[0] for line in named if line[:3].strip() or (line.startswith("  ") and line[2] != " ")
        } == verbs
    refused = run(program, "doctor", "--home", str(tmp_path))
    assert refused.returncode == 2
    assert (
        refused.stderr
        == "fedquilt: this needs the full package fedquilt, which is not installed: pip install 'fedquilt'\n"
    )
    for group, verb in (("model", "evaluate"), ("identity", "list"), ("board", "flash")):
        refused = run(program, group, verb, "x")
        assert refused.returncode == 2
        assert f"the verb '{verb}' is not installed: install the package fedquilt" in refused.stderr


def test_an_agent_of_a_board_is_examined_and_takes_part_in_rounds(program: Path, tmp_path: Path) -> None:
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
