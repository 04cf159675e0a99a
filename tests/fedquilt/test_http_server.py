"""Addresses that the HTTP server cannot listen at."""

import pytest

from fedquilt.core import JobError
from fedquilt.host.http_server import HttpServer


@pytest.mark.parametrize(
    ("host", "port"),
    [("a..b", 0), ("a" * 64, 0), ("a\0b", 0), ("127.0.0.1", 65536), ("127.0.0.1", -1), ("no.such.host.invalid", 0)],
)
def test_an_address_that_is_none_raises_the_documented_error(host, port):
    with pytest.raises(JobError, match=f"cannot listen at .*{port} .*: choose another address"):
        HttpServer(host, port, lambda exchange: None)
