"""The house: links and the wheel agree, nothing heavy is imported where it may not be."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from fedquilt import methods
from fedquilt.formats import toml

ROOT = Path(__file__).parents[2]
FOLDERS = ("coordinator", "edge_agent", "models", "profiles", "tools")
MOST_LINES = 600
MOST_FILES = 12
PLUGINS = ("fedquilt/cli", "fedquilt/methods")  # files of commands, and a file for each method
HEAVY = ("torch", "torchvision", "onnx", "onnxruntime", "pandas", "sklearn")


def imported(code: str) -> set[str]:
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*{{m.split('.')[0] for m in sys.modules}})"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(shown.stdout.split())


def test_links_and_package_mapping_agree() -> None:
    """`fedquilt/x` is a relative link to the folder that `fedquilt.x` is packaged from."""
    setup = toml.read_toml(ROOT / "pyproject.toml")["tool"]["setuptools"]
    assert setup["package-dir"] == {f"fedquilt.{folder}": folder for folder in FOLDERS}
    links = {path.name: str(path.readlink()) for path in (ROOT / "fedquilt").iterdir() if path.is_symlink()}
    assert links == {folder: f"../{folder}" for folder in FOLDERS}


@pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("make") is None, reason="a checkout and make are needed"
)
def test_make_tree_writes_the_package_without_links(tmp_path: Path) -> None:
    """Of a clean clone: all of `fedquilt` is imported from real folders."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)], check=True)
    subprocess.run(["make", "--silent", "tree"], cwd=clone, check=True)
    tree = clone / "build" / "tree"
    assert [path for path in tree.rglob("*") if path.is_symlink()] == []
    modules = ", ".join(f"fedquilt.{folder}" for folder in FOLDERS)
    shown = subprocess.run(
        [sys.executable, "-c", f"import {modules}; print(fedquilt.tools.__file__)"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(shown.stdout.strip()) == tree / "fedquilt" / "tools" / "__init__.py"


def test_every_package_folder_is_listed() -> None:
    """A folder with an __init__.py that is missing in `packages` would be missing in the wheel."""
    setup = toml.read_toml(ROOT / "pyproject.toml")["tool"]["setuptools"]
    ours = {init.parent.relative_to(ROOT) for init in (ROOT / "fedquilt").rglob("__init__.py")}
    linked = {init.parent.relative_to(ROOT) for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py")}
    found = {".".join(path.parts) for path in ours} | {".".join(("fedquilt", *path.parts)) for path in linked}
    assert set(setup["packages"]) == found


def product_files() -> list[Path]:
    files = [path for place in (*FOLDERS, "fedquilt", "examples") for path in (ROOT / place).rglob("*.py")]
    return [path for path in files if not any(up.is_symlink() for up in path.parents)]


def test_a_file_has_at_most_600_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in product_files()
    }
    assert len(lengths) > 300
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_a_folder_has_at_most_12_files() -> None:
    """Folders of plug-ins, which are found by file name, may have more."""
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in product_files())
    assert {name for name, count in counts.items() if count > MOST_FILES and name not in PLUGINS} == set()


def test_tools_are_packages_only() -> None:
    """Each tool has a folder that says what it is."""
    assert [path.name for path in (ROOT / "tools").glob("*.py")] == ["__init__.py"]


def test_shared_code_and_coordinator_import_nothing_heavy() -> None:
    modules = (
        "cli",
        "transport.mqtt.link",
        "coordinator.server",
        "coordinator.views.terminal",
        "tools.simulation.agents",
        *(f"methods.{name}" for name in methods.builtin_names()),
    )
    assert not imported(f"import {', '.join(f'fedquilt.{module}' for module in modules)}") & set(HEAVY)


def test_the_agent_daemon_imports_not_even_numpy() -> None:
    """That is 17 MB a board's idle daemon does not hold."""
    assert not imported("import fedquilt.edge_agent.agent") & {*HEAVY, "numpy"}


def copied(copy: Path) -> Path:
    """A copy of the checkout, its links as they are, so that a build leaves the checkout alone."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_file():
            target.write_bytes(source.read_bytes())
    return copy


def run_pip(verb: str, *words: str) -> None:
    """Run pip without dependencies, and without an environment of the build's own where setuptools is here."""
    built_here = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    command = [sys.executable, "-m", "pip", verb, "-q", "--no-deps", "--disable-pip-version-check", *built_here]
    subprocess.run([*command, *words], check=True, capture_output=True)


def test_an_editable_installation_is_found_beside_a_clone_named_fedquilt(tmp_path: Path) -> None:
    """Agents and tasks are started by `python -c` and `-m`, which search the current folder first."""
    clone = copied(tmp_path / "fedquilt")
    run_pip("install", "--ignore-installed", "--prefix", str(tmp_path / "there"), "-e", str(clone))
    (link,) = (tmp_path / "there").rglob("__editable__*.pth")
    code = f"import site; site.addsitedir({str(link.parent)!r}); from fedquilt import __file__; print(__file__)"
    shown = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str(clone / "fedquilt/__init__.py")


def test_a_wheel_installs_nothing_at_top_level_but_fedquilt(tmp_path: Path) -> None:
    """And carries the profiles, the demo's data and the type marker; built without touching the checkout."""
    copy = copied(tmp_path / "source")
    run_pip("wheel", "-w", str(tmp_path), str(copy))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fedquilt"}
    for wanted in (
        "fedquilt/py.typed",
        "fedquilt/tools/lab/demo/job.toml",
        "fedquilt/tools/lab/demo/bundle/bundle.json",
    ):
        assert wanted in names
    assert any(name.startswith("fedquilt/profiles/") and name.endswith(".toml") for name in names)
    shown = subprocess.run(
        [sys.executable, "-c", "import fedquilt.cli, fedquilt.coordinator as c; print(c.__file__)"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip().startswith(str(tmp_path / "site"))
