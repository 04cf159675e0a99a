"""Bundle of an upgrade over the air, from the wheels that `fedquilt flash` installs: `edge_agent.upgrade.archive`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

import fedquilt
from fedquilt.edge_agent.upgrade import archive
from fedquilt.edge_agent.upgrade.archive import Manifest
from fedquilt.tools.flash import bundle, wheels
from fedquilt.tools.flash.targets import Target

Say = Callable[[str], None]


def manifest(house: Sequence[Path], target: Target, *, whole: bool, system_packages: bool = False) -> Manifest:
    """Manifest of a bundle.

    Args:
        house: fedquilt's own wheel first, then what it needs.
        target: kind of board.
        whole: bring all of it; else fedquilt's own, and the rest has to be on the board already.
        system_packages: let the agent see the packages of the board's own Python.
    """
    brought, left = (house, ()) if whole else (house[:1], house[1:])
    known = [wheels.Wheel.read(path) for path in left]
    return Manifest(
        format=archive.FORMAT,
        version=fedquilt.__version__,
        machine=target.machine,
        python=target.python,
        wheels={path.name: wheels.sha256(path) for path in brought},
        unpacked_bytes=sum(map(bundle.unpacked_bytes, brought)),
        system_packages=system_packages,
        present={one.name: one.version for one in known},
        made_s=int(time.time()),
    )


def pack(made: Manifest, house: Sequence[Path], out: Path, sign: Callable[[bytes], bytes] | None) -> int:
    """Write a bundle; its size in bytes.

    Args:
        made: its manifest.
        house: files of its wheels, and perhaps others.
        out: where it goes.
        sign: makes the signature of the manifest's bytes; None: it is not signed.

    Raises:
        StoreError: it cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"
    files: dict[str, bytes | Path] = {f"wheels/{path.name}": path for path in house if path.name in made.wheels}
    files[archive.MANIFEST] = text
    if sign is not None:
        files[archive.SIGNATURE] = sign(text)
    return bundle.pack(files, out, private=False)


def make(
    house: Sequence[Path],
    target: Target,
    out: Path,
    authority: Path,
    *,
    whole: bool = False,
    system_packages: bool = False,
    say: Say = print,
) -> None:
    """Write a bundle, signed where the fleet's authority is at hand, and say what it is.

    Raises:
        StoreError: it cannot be written, or the authority is damaged.
    """
    made = manifest(house, target, whole=whole, system_packages=system_packages)
    sign = None
    if (authority / "ca.key").is_file():
        from fedquilt.tools.identity.authority import Authority

        signs = Authority(authority)
        sign, made = signs.sign_upgrade, msgspec.structs.replace(made, number=signs.next_upgrade(time.time()))
    size = pack(made, house, out, sign)
    signed = f"signed by the authority in {authority}" if sign else f"not signed: no authority in {authority}"
    brings = f"{len(made.wheels)} wheel{'s' * (len(made.wheels) > 1)}"
    kind = f"{target.machine}, Python {made.python}"
    say(f"{out}: fedquilt {made.version} for {kind}; {brings}, {size / 1e6:.1f} MB, {signed}")
    if made.present:
        say(f"boards keep the other {len(made.present)} packages that they were flashed with (--whole brings them too)")
    say(f"fedquilt upgrade {out} --home HOME brings it to the fleet")
