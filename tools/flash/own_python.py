"""A Python to bring along to a board whose own is too old: JetPack 5 has 3.8, JetPack 4 has 3.6.

    python -m fedquilt.tools.flash.own_python python-3.11-aarch64.tar

It is Debian 12's, with the C library and every other library that it was built with. None of the board's are loaded:
neither its glibc (2.27 or 2.31) nor its libstdc++ counts. A board's kernel has to be 3.7 or newer. The packages are
downloaded and verified by this machine's apt.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from fedquilt.core import FedquiltError, JobError
from fedquilt.disk import doing

VERSION: Final = "3.11"
SUITE: Final = "bookworm"
KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES: Final = (
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5"),
    *("libsqlite3-0", "libuuid1", "libcrypt1", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib"),
)
TARGETS: Final = ("apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)|$(LABEL)")
LIBRARIES: Final = re.compile(r"(lib|usr/lib)/aarch64-linux-gnu/[^/]+\.so[^/]*")
LEFT_OUT: Final = ("idlelib", "turtledemo", "tkinter", "ensurepip", "sitecustomize.py")  # the last leads into /etc
LOADER: Final = "libc/ld-linux-aarch64.so.1"
START: Final = f"""#!/bin/sh
# Python {VERSION} by the loader and with the libraries beside it; the system's own are not looked at
case $0 in */*) me=$0 ;; *) me=$(command -v "$0") ;; esac
home=$(dirname "$(dirname "$(readlink -f "$me")")")
exec "$home/{LOADER}" --argv0 "$me" --library-path "$home/libc" "$home/libexec/python{VERSION}" "$@"
"""

Run = Callable[[Sequence[str]], str]


def run(words: Sequence[str], given: str = "") -> str:
    """What a program says on standard output.

    Raises:
        JobError: it is not there or fails; with its last words.
    """
    try:
        done = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
    except OSError as error:
        raise JobError(f"{words[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["(it said nothing)"]
        raise JobError(f"{' '.join(words[:4])} ... ended with {done.returncode}: {said[-1]}")
    return done.stdout


def debian_mirror(suite: str, listed: Run = run) -> str:
    """The Debian archive that apt uses here; the one with this suite if there are several.

    Raises:
        JobError: apt knows none.
    """
    try:
        rows = [line.split("|") for line in listed([*TARGETS, "Created-By: Packages"]).splitlines()]
    except JobError as error:
        rows, why = [], f"apt does not say where Debian is ({error})"
    else:
        why = "apt knows no archive of Debian's here"
    theirs = [row for row in rows if row[2:] == ["main", "Debian", "Debian"]]
    # another release's will do: an archive holds them all
    for row in sorted(theirs, key=lambda row: row[1] != suite):
        return row[0].rstrip("/")
    raise JobError(f"{why}: name one with --mirror URL, or run `apt-get update` if its lists are missing")


def make(out: Path, mirror: str | None = None) -> int:
    """Make the archive; its size in bytes.

    Args:
        out: file for the tar archive: one folder, `python`.
        mirror: Debian's archive; None: the one that apt uses here.

    Raises:
        JobError: apt or dpkg-deb are missing or fail.
        StoreError: it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="fedquilt-") as scratch:
        packages = download(Path(scratch), mirror or debian_mirror(SUITE))
        return pack(compose(packages, Path(scratch)), out)


def download(scratch: Path, mirror: str) -> list[Path]:
    """Debian's packages for arm64, verified by apt with Debian's keys; this machine's own lists stay as they are."""
    for folder in ("lists/partial", "cache/archives/partial", "debs"):
        (scratch / folder).mkdir(parents=True)
    (scratch / "status").touch()
    (scratch / "list").write_text(f"deb [arch=arm64 signed-by={KEYRING}] {mirror} {SUITE} main\n")
    own = {
        "Dir::State::lists": scratch / "lists",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch / "cache",
        "Dir::Etc::sourcelist": scratch / "list",
        "Dir::Etc::sourceparts": "/dev/null",
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
    }
    words = ["apt-get", "-q", *(f"-o{key}={value}" for key, value in own.items())]
    run([*words, "update"])
    run(["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(scratch / "debs"), *words, "download", *PACKAGES])
    return sorted((scratch / "debs").glob("*.deb"))


def compose(packages: Iterable[Path], scratch: Path) -> Path:
    """The folder of a Python that runs from wherever it lies, of Debian's packages."""
    whole, home = scratch / "whole", scratch / "python"
    for package in packages:
        run(["dpkg-deb", "-x", str(package), str(whole)])
    for folder in ("bin", "libc", "libexec", "lib"):
        (home / folder).mkdir(parents=True)
    shutil.copy(whole / f"usr/bin/python{VERSION}", home / "libexec")
    leave = shutil.ignore_patterns(*LEFT_OUT, "__pycache__")
    shutil.copytree(whole / f"usr/lib/python{VERSION}", home / f"lib/python{VERSION}", symlinks=True, ignore=leave)
    for path in whole.rglob("*.so*"):
        if LIBRARIES.fullmatch(path.relative_to(whole).as_posix()):
            shutil.copy(path, home / "libc" / path.name, follow_symlinks=False)
    start = home / f"bin/python{VERSION}"
    start.write_text(START)
    start.chmod(0o755)
    return home


def pack(home: Path, out: Path) -> int:
    """The folder as a tar archive, root's own; its size in bytes. The same files make the same bytes."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with doing(f"write {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(out, "w") as archive:
            archive.add(home, "python", filter=plain)
    return out.stat().st_size


def check(path: Path) -> str:
    """Version of the Python in an archive to bring along, as "3.11".

    Raises:
        JobError: it is no such archive.
    """
    try:
        with tarfile.open(path) as archive:
            names = archive.getnames()
    except (OSError, tarfile.TarError) as error:
        raise JobError(f"--own-python {path} cannot be read ({error}): {__name__} makes one") from None
    found = [one[1] for one in (re.fullmatch(r"python/bin/python(3\.\d+)", name) for name in names) if one]
    strange = [name for name in names if name.split("/")[0] != "python" or ".." in name.split("/")]
    if strange or not found:
        raise JobError(f"--own-python {path} holds no python/bin/python3.N: {__name__} makes such an archive")
    return found[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make one by the words of the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}", description="Make a Python to bring to old boards.")
    parser.add_argument("out", type=Path, help="the archive to write, such as python-3.11-aarch64.tar")
    parser.add_argument("--mirror", help="Debian's archive (default: the one that apt uses here)")
    options = parser.parse_args(arguments)
    try:
        size = make(options.out, options.mirror)
    except FedquiltError as error:
        print(f"fedquilt: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: Python {VERSION} for aarch64, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
