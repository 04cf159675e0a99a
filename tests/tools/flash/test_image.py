"""Disk images: the root partition is found by the partition table, and filled without root and without a mount."""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from boards import AARCH64, HERE, plant

from fedquilt.core import JobError
from fedquilt.tools.boards.flash import image, install
from fedquilt.tools.boards.flash.install import InstallRefusedError

SECTOR = 512
MKFS = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH')}:/usr/sbin:/sbin")
pytestmark = pytest.mark.skipif(MKFS is None, reason="there is no mkfs.ext4 here (e2fsprogs)")


def ext(folder: Path, to: Path, size: str = "48M") -> bytes:
    subprocess.run([str(MKFS), "-q", "-d", str(folder), "-b", "4096", str(to), size], check=True, capture_output=True)
    return to.read_bytes()


def raspberry(root: bytes) -> bytes:
    boot, start = 4 << 20, 8 << 20
    rows = ((0x0C, boot, start - boot), (0x83, start, len(root)), (0, 0, 0), (0, 0, 0))
    table = b"".join(struct.pack("<B3xB3xII", 0, kind, at // SECTOR, size // SECTOR) for kind, at, size in rows)
    return bytes(446) + table + b"\x55\xaa" + bytes(boot - SECTOR) + b"\xeb" * (start - boot) + root


def tegra(root: bytes, other: bytes) -> bytes:
    begin, names = 2 << 20, (("APP", root), ("UDA", other))
    size = begin + len(root) + len(other) + (1 << 20)
    entries, at = b"", begin
    for name, data in names:
        last = (at + len(data)) // SECTOR - 1
        entries += bytes([len(entries) + 1]) * 32 + struct.pack("<QQQ", at // SECTOR, last, 0)
        entries += name.encode("utf-16-le").ljust(72, b"\0")
        at += len(data)
    entries = entries.ljust(128 * 128, b"\0")

    def head(crc: int) -> bytes:
        first = struct.pack("<8sIIII", b"EFI PART", 0x10000, 92, crc, 0)
        blocks = struct.pack("<QQQQ16s", 1, size // SECTOR - 1, 34, size // SECTOR - 34, b"\x01" * 16)
        return first + blocks + struct.pack("<QIII", 2, 128, 128, zlib.crc32(entries))

    protective = struct.pack("<B3xB3xII", 0, 0xEE, 1, size // SECTOR - 1)
    top = bytes(446) + protective + bytes(48) + b"\x55\xaa" + head(zlib.crc32(head(0))).ljust(SECTOR, b"\0")
    return ((top + entries).ljust(begin, b"\0") + root + other).ljust(size, b"\0")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "usr/bin").mkdir(parents=True)
    (folder / "bin").symlink_to("usr/bin")
    plant(folder, AARCH64, sys.executable)
    (folder / "usr/bin/dash").write_bytes((folder / "usr/bin/sh").read_bytes())
    (folder / "usr/bin/sh").unlink()
    (folder / "usr/bin/sh").symlink_to("dash")
    (folder / "etc/systemd/system/multi-user.target.wants").mkdir(parents=True)
    (folder / "etc/hostname").write_text("as it was\n")
    return folder


@pytest.fixture
def base(tmp_path: Path, tree: Path) -> Path:
    path = tmp_path / "raspios.img"
    path.write_bytes(raspberry(ext(tree, tmp_path / "root.ext4")))
    return path


def inside(path: Path, tmp_path: Path) -> Path:
    part = image.find_root_partition(path)
    out = tmp_path / f"out-{path.stem}"
    out.mkdir()
    system = f"{path}?offset={part.offset}"
    debugfs = shutil.which("debugfs", path="/usr/sbin:/sbin")
    subprocess.run([str(debugfs), "-R", f'rdump / "{out}"', system], check=True, capture_output=True)
    return out


def put(base: Path, out: Path, bundle: Path) -> list[str]:
    said: list[str] = []
    with image.open_image_copy(base, out, HERE.interpreter, said.append) as copied:
        install.install_bundle(bundle, copied.root)
        copied.save_image()
    return said


def test_a_raspberrys_image_gets_what_a_mounted_root_gets(
    base: Path, tree: Path, tmp_path: Path, make: Callable[..., Path]
) -> None:
    before = hashlib.sha256(base.read_bytes()).digest()
    bundle = make({"agent.toml": b'device = "orin-1"\n', "token": b"secret\n"}, HERE)
    said = put(base, tmp_path / "orin-1.img", bundle)
    assert hashlib.sha256(base.read_bytes()).digest() == before
    assert said[-1].endswith("installed in partition 2; write the image to a card as usual")
    install.install_bundle(bundle, install.RootFileSystem(tree, print_line=lambda line: None))
    got = inside(tmp_path / "orin-1.img", tmp_path)

    def listed(folder: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if name.startswith("lost+found") or path.suffix == ".pyc":
                continue
            what: object = None
            if path.is_symlink():
                what = str(path.readlink())
            elif path.is_file():
                what = (path.read_bytes(), path.stat().st_mode)
            found[name] = what
        return found

    assert listed(got) == listed(tree)
    assert (got / "etc/fedquilt/token").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "orin-1.img").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "orin-1.img").read_bytes()[: 8 << 20] == base.read_bytes()[: 8 << 20]


def test_l4ts_partition_is_the_one_named_app(tree: Path, tmp_path: Path, make: Callable[..., Path]) -> None:
    (tmp_path / "empty").mkdir()
    other = ext(tmp_path / "empty", tmp_path / "other.ext4", "64M")
    base = tmp_path / "sd-blob.img.xz"
    with lzma.open(base, "wb", preset=0) as file:
        file.write(tegra(ext(tree, tmp_path / "root.ext4"), other))
    said = put(base, tmp_path / "orin.img", make(target=HERE))
    assert "partition 1 (APP)" in said[-1]
    assert (inside(tmp_path / "orin.img", tmp_path) / "etc/fedquilt/agent.toml").is_file()


def test_an_image_that_is_one_file_system_is_taken(tree: Path, tmp_path: Path, make: Callable[..., Path]) -> None:
    ext(tree, tmp_path / "system.img.raw")
    assert "one file system" in put(tmp_path / "system.img.raw", tmp_path / "o.img", make(target=HERE))[-1]
    (tmp_path / "system.img").write_bytes(b"\x3a\xff\x26\xed" + bytes(4096))
    with pytest.raises(InstallRefusedError, match="simg2img"):
        put(tmp_path / "system.img", tmp_path / "p.img", make(target=HERE))


def test_another_machine_and_another_python_are_refused(tree: Path, tmp_path: Path) -> None:
    (tree / "usr/bin/python3.13").write_bytes((tree / "usr/bin/dash").read_bytes())
    ext(tree, tmp_path / "a.img")
    asked = {"interpreter": "/usr/bin/python3.11", "machine": "aarch64"}
    with image.open_image_copy(tmp_path / "a.img", tmp_path / "o.img", "/usr/bin/python3.11", print) as copied:
        with pytest.raises(InstallRefusedError, match=r"has no /usr/bin/python3\.11, but python3\.13"):
            install.check_compatibility(copied.root, asked)
        with pytest.raises(InstallRefusedError, match="is aarch64, but the bundle is for x86_64"):
            install.check_compatibility(copied.root, {**asked, "machine": "x86_64"})
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("o.img")]


def test_an_image_that_is_too_full_is_left_alone(tree: Path, tmp_path: Path, make: Callable[..., Path]) -> None:
    (tree / "usr/full").write_bytes(os.urandom(7 << 20))
    ext(tree, tmp_path / "a.img", "12M")
    bundle = make(target=HERE)
    (tmp_path / "large").write_bytes(bytes(8 << 20))

    def put_a_large_one() -> None:
        with image.open_image_copy(tmp_path / "a.img", tmp_path / "o.img", HERE.interpreter, print) as copied:
            install.install_bundle(bundle, copied.root)
            shutil.copy(tmp_path / "large", copied.root.path / "opt/fedquilt")
            copied.save_image()

    with pytest.raises(InstallRefusedError, match=r"MB free, but .* MB are needed: .*resize2fs"):
        put_a_large_one()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("o.img")]


def test_a_second_flash_of_the_same_image_is_refused(base: Path, tmp_path: Path, make: Callable[..., Path]) -> None:
    bundle = make(target=HERE)
    put(base, tmp_path / "one.img", bundle)
    with pytest.raises(InstallRefusedError, match="has /opt/fedquilt already"):
        put(tmp_path / "one.img", tmp_path / "two.img", bundle)


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"PK\3\4" + bytes(5000), "no ext4 root file system .*no partition table"), (b"", "no ext4 root file system")],
)
def test_what_is_no_image_is_told(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "x.img").write_bytes(data)
    with (
        pytest.raises(InstallRefusedError, match=f"x.img has {says}"),
        image.open_image_copy(tmp_path / "x.img", tmp_path / "o.img", "/p", print),
    ):
        pass
    with (
        pytest.raises(JobError, match="is not a file"),
        image.open_image_copy(tmp_path / "y", tmp_path / "o.img", "/p", print),
    ):
        pass
    (tmp_path / "cut.xz").write_bytes(lzma.compress(bytes(100000))[:-40])
    with (
        pytest.raises(JobError, match="is damaged"),
        image.open_image_copy(tmp_path / "cut.xz", tmp_path / "o", "/p", print),
    ):
        pass


def test_a_table_with_partitions_but_no_root_names_them(tmp_path: Path) -> None:
    (tmp_path / "a.img").write_bytes(raspberry(bytes(1 << 20)))
    with pytest.raises(InstallRefusedError, match=r"\(partition 1, partition 2\)"):
        image.find_root_partition(tmp_path / "a.img")
