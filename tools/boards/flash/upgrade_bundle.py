"""Bundle of an over-the-air upgrade, made from the wheels of `fedquilt board flash`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

import fedquilt
from fedquilt.edge_agent.upgrade import archive
from fedquilt.edge_agent.upgrade.archive import UpgradeManifest
from fedquilt.tools.boards.flash import bundle, wheels
from fedquilt.tools.boards.targets import BundleTarget

Say = Callable[[str], None]


def build_manifest(house: Sequence[Path], target: BundleTarget, *, whole: bool) -> UpgradeManifest:
    """Return the manifest of an upgrade bundle.

    Args:
        house: Fedquilt's own wheel first, then its dependencies.
        target: Kind of board.
        whole: Whether to include the dependencies. Otherwise the board must have them already.
    """
    brought, left = (house, ()) if whole else (house[:1], house[1:])
    known = [wheels.Wheel.from_file(path) for path in left]
    return UpgradeManifest(
        format=archive.FORMAT,
        version=fedquilt.__version__,
        machine=target.machine,
        python=target.python,
        wheels={path.name: wheels.file_sha256(path) for path in brought},
        unpacked_bytes=sum(map(bundle.unpacked_bytes, brought)),
        present={one.name: one.version for one in known},
        made_s=int(time.time()),
    )


def pack_bundle(made: UpgradeManifest, house: Sequence[Path], out: Path, sign: Callable[[bytes], bytes] | None) -> int:
    """Write an upgrade bundle, unsigned if `sign` is None. Return its size in bytes.

    Args:
        made: Manifest of the bundle.
        house: Wheel files. Wheels that the manifest does not name are left out.
        out: File to write.
        sign: Function that signs the manifest's bytes, or None.

    Raises:
        StoreError: If the file cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"
    files: dict[str, bytes | Path] = {f"wheels/{path.name}": path for path in house if path.name in made.wheels}
    files[archive.MANIFEST] = text
    if sign is not None:
        files[archive.SIGNATURE] = sign(text)
    return bundle.write_archive(files, out, private=False)


def sign_and_write_bundle(
    house: Sequence[Path],
    target: BundleTarget,
    out: Path,
    authority: Path,
    *,
    whole: bool = False,
    say: Say = print,
) -> None:
    """Write an upgrade bundle, signed if the authority's key is here, and print a summary.

    Raises:
        StoreError: If the bundle cannot be written, or the authority is damaged.
    """
    made = build_manifest(house, target, whole=whole)
    sign = None
    if (authority / "ca.key").is_file():
        from fedquilt.tools.identity.authority import CertificateAuthority

        signs = CertificateAuthority(authority)
        sign, made = signs.sign_upgrade, msgspec.structs.replace(made, number=signs.next_upgrade_number(time.time()))
    size = pack_bundle(made, house, out, sign)
    signed = f"signed by the authority in {authority}" if sign else f"not signed: no authority in {authority}"
    brings = f"{len(made.wheels)} wheel{'s' * (len(made.wheels) > 1)}"
    kind = f"{target.machine}, Python {made.python}"
    say(f"{out}: fedquilt {made.version} for {kind}; {brings}, {size / 1e6:.1f} MB, {signed}")
    if made.present:
        say(f"boards keep the other {len(made.present)} packages that they were flashed with (--whole brings them too)")
    say(f"fedquilt rollout agent {out} --home HOME brings it to the fleet")
