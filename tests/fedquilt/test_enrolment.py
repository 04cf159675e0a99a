"""What both sides of enrolment share."""

import os

import pytest

from fedquilt.core import StoreError, WireError
from fedquilt.security import enrolment
from fedquilt.security.enrolment import SigningRequest, SigningResponse


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"device":"a"}',
        b'{"device":"a","csr":1}',
        b'{"device":"../a","csr":""}',
        b"[" * 9999,
    ],
)
def test_a_body_that_is_no_request_is_one_named_error(body):
    with pytest.raises(WireError, match="enrolment message is malformed"):
        enrolment.decode_message(body, SigningRequest)


def test_an_error_never_quotes_a_token():
    with pytest.raises(WireError) as caught:
        enrolment.decode_message(b'{"device":"a","csr":"b","token":"' + b"secret" * 99 + b'"}', SigningRequest)
    assert "secret" not in str(caught.value)
    with pytest.raises(WireError, match="more than 16384"):
        enrolment.decode_message(b" " * 16385, SigningResponse)


def test_a_secret_is_never_readable_by_others_and_a_file_is_whole_or_the_old_one(tmp_path, monkeypatch):
    path, modes = tmp_path / "key", []
    sync = os.fsync

    def watched(number):
        modes.append(os.fstat(number).st_mode & 0o777)
        sync(number)

    monkeypatch.setattr(os, "fsync", watched)
    before = os.umask(0)
    try:
        enrolment.write_file_with_mode(path, b"one", 0o600)
    finally:
        os.umask(before)
    assert modes[0] == path.stat().st_mode & 0o777 == 0o600

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"cannot write .*key"):
        enrolment.write_file_with_mode(path, b"two", 0o600)
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["key"]
