"""Metrics as whoever reads them gets them."""

import urllib.request

import pytest
from waiting import LIMIT_S

from fedquilt import metrics_endpoint
from fedquilt.core import JobError
from fedquilt.metrics_endpoint import MetricFamily

FAMILIES = [
    MetricFamily("fq_jobs", "counter", "jobs so far", (), [((), 3.0)]),
    MetricFamily("fq_watts", "gauge", "watts", ("device",), [(("a",), 2.5), (("b",), 7.0)]),
]


@pytest.mark.parametrize(
    ("listen", "place"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:80", ("::1", 80)),
        ("board.site:65535", ("board.site", 65535)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_an_address_is_a_host_and_a_port(listen, place):
    assert metrics_endpoint.parse_listen_address(listen) == place


@pytest.mark.parametrize("listen", ["9464", ":9464", "host:", "host:65536", "host:-1", "host:1e3", "host:٣"])
def test_what_is_no_address_is_refused_with_an_example(listen):
    with pytest.raises(JobError, match=r"write HOST:PORT, such as 127\.0\.0\.1:9464"):
        metrics_endpoint.parse_listen_address(listen)


def test_each_kind_is_served_as_that_and_the_port_is_free_again_afterwards():
    pytest.importorskip("prometheus_client")
    listen = "127.0.0.1:0"
    for _ in range(2):
        with metrics_endpoint.serve_metrics(listen, lambda: FAMILIES) as where:
            listen = where.removeprefix("http://").removesuffix("/metrics")
            with urllib.request.urlopen(where, timeout=LIMIT_S) as answer:
                text = answer.read().decode().splitlines()
        assert {"fq_jobs_total 3.0", 'fq_watts{device="a"} 2.5', 'fq_watts{device="b"} 7.0'} <= set(text)
        assert any(line.startswith("# TYPE fq_jobs") and line.endswith(" counter") for line in text)
        assert "# TYPE fq_watts gauge" in text


def test_nothing_is_served_where_nobody_asked_for_it():
    with metrics_endpoint.serve_metrics(None, lambda: pytest.fail("collected")) as where:
        assert where == ""


def test_a_place_that_is_taken_is_named_with_the_mend():
    pytest.importorskip("prometheus_client")
    with metrics_endpoint.serve_metrics("127.0.0.1:0", lambda: FAMILIES) as where:
        taken = where.removeprefix("http://").removesuffix("/metrics")
        again = metrics_endpoint.serve_metrics(taken, lambda: FAMILIES)
        with (
            pytest.raises(JobError, match=f"cannot listen at {taken} .address already in use.: choose"),
            again,
        ):
            pytest.fail("served twice")
