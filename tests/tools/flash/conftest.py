"""A board's root, and bundles for it."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from boards import ELF, INTERPRETER, JETSON, plant, required, wheel

from fedquilt.tools.boards.flash import bundle, own_wheels
from fedquilt.tools.boards.flash.install import RootFileSystem
from fedquilt.tools.boards.flash.own_wheels import OwnWheel
from fedquilt.tools.boards.targets import BundleTarget

build = own_wheels.build_own_wheel
SSH = """#!/bin/sh
# a host that is here: options and the host's name first, then one command
while [ "${1#-}" != "$1" ]; do shift; done
echo "$1" >> "$FAKE/hosts"
shift
echo "$*" >> "$FAKE/commands"
test -e "$FAKE/down" && { echo "ssh: connect to host orin port 22: No route to host" >&2; exit 255; }
PATH="$FAKE/there:$PATH" exec sh -c "$*"
"""
SUDO = """#!/bin/sh
# root of a board that is a folder
for word; do
    shift
    case "$word" in /opt/*) word="$FAKE/board$word" ;; esac
    set -- "$@" "$word"
done
exec "$@" --root "$FAKE/board"
"""


@pytest.fixture(scope="session", autouse=True)
def own_wheels_built_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    built: dict[str, Path] = {}

    @functools.wraps(build)
    def copy_wheel(folder: Path, name: OwnWheel = "fedquilt-board") -> Path:
        if name not in built:
            built[name] = build(tmp_path_factory.mktemp("own"), name)
        return Path(shutil.copy(built[name], folder))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_wheels, "build_own_wheel", copy_wheel)
        yield


@pytest.fixture
def root(tmp_path: Path) -> RootFileSystem:
    return RootFileSystem(plant(tmp_path / "root"), print_line=lambda line: None)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    count = 0

    def make(
        files: Mapping[str, bytes] | None = None,
        target: BundleTarget = JETSON,
        wheels: tuple[Path, ...] | None = None,
        enrols: bool = False,
    ) -> Path:
        nonlocal count
        count += 1
        board = bundle.BoardFiles("orin-1", files or {"agent.toml": b'device = "orin-1"\n'}, 1_000_000_000, enrols)
        house = (wheel(tmp_path / "wheels", "toy"),) if wheels is None else wheels
        folder = tmp_path / f"bundle-{count}"
        bundle.write_folder(bundle.collect_files(board, target, house), folder)
        return folder

    return make


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    for name in required():
        wheel(folder / "index", name.replace("-", "_"), "99.0")
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shop: Path) -> Path:
    (tmp_path / "agent.toml").write_text('device = "orin-1"\nhome = "x"\nbudget = "1GB"\n')
    (tmp_path / "there").mkdir()
    (tmp_path / "tmp").mkdir()
    for path, text in (("ssh", SSH), ("there/sudo", SUDO), ("there/id", "#!/bin/sh\necho 1000\n")):
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    plant(tmp_path / "board", ELF, INTERPRETER)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop / "index"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(shop / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def site(tmp_path: Path, authority) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    cert, key = authority.issue("orin-1")
    for source, name in ((authority.ca, "ca.crt"), (cert, "orin-1.crt"), (key, "orin-1.key")):
        shutil.copy(source, folder / name)
    (folder / "pw").write_text("secret\n")
    return folder
