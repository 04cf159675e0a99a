"""Wheels that are damaged, or packed as no wheel is: the one named error, and nothing outside the environment."""

import io
import struct
import zipfile

import pytest

from fedquilt.host import virtual_environment


def packed(way: int = zipfile.ZIP_DEFLATED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", way) as archive:
        archive.writestr("toy.py", b"x = 1\n" * 200)
    return made.getvalue()


def encrypted() -> bytes:
    whole = bytearray(packed())
    whole[6] |= 1
    whole[whole.index(b"PK\1\2") + 8] |= 1
    return bytes(whole)


def garbled() -> bytes:
    whole = bytearray(packed())
    whole[36:40] = b"\xff" * 4
    return bytes(whole)


def nowhere() -> bytes:
    whole = bytearray(packed())
    at = whole.index(b"PK\5\6") + 16
    whole[at : at + 4] = struct.pack("<I", struct.unpack("<I", whole[at : at + 4])[0] + 9)
    return bytes(whole)


@pytest.mark.parametrize(
    "wheel",
    [
        b"",
        packed()[:-30],
        encrypted(),
        garbled(),
        nowhere(),
        packed(zipfile.ZIP_LZMA),
        packed().replace(b"toy.py", b"to\xff.py").replace(b"PK\3\4\x14\0\0\0", b"PK\3\4\x14\0\0\x08"),
    ],
    ids=["empty", "cut", "encrypted", "garbled", "nowhere", "lzma", "name"],
)
def test_what_is_no_wheel_is_told(wheel, tmp_path):
    with pytest.raises(virtual_environment.InvalidWheelError, match=r"^toy\.whl "):
        virtual_environment.unpack_wheels([("toy.whl", io.BytesIO(wheel))], tmp_path / "packages", 1 << 20)
    assert [*tmp_path.iterdir()] == [tmp_path / "packages"]


def test_a_whole_wheel_is_unpacked(tmp_path):
    virtual_environment.unpack_wheels([("toy.whl", io.BytesIO(packed()))], tmp_path, 1 << 20)
    assert (tmp_path / "toy.py").read_bytes() == b"x = 1\n" * 200


def test_all_users_may_read_the_files_and_run_the_programs(tmp_path):
    for name, mode in (("program", 0o700), ("text", 0o600), ("open", 0o666)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("absent")
    virtual_environment.set_public_modes(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir() if not path.is_symlink()}
    assert modes == {"program": 0o755, "text": 0o644, "open": 0o644, "folder": 0o755}
