"""Metrics for Prometheus and its like, at http://HOST:PORT/metrics in the OpenMetrics format.

Whoever has metrics makes plain values (`Family`); the package prometheus_client, the extra `metrics`, is imported only
where they are served. They are served from a thread of their own: who reads them, or does not, changes nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from fedquilt import extras
from fedquilt.core import JobError

log = logging.getLogger(__name__)


class Family(NamedTuple):
    """One metric: its samples differ in their labels' values."""

    name: str  # of a counter without "_total"
    kind: Literal["gauge", "counter"]
    about: str
    labels: tuple[str, ...]
    samples: Sequence[tuple[tuple[str, ...], float]]  # values of `labels`, and the value


def address(listen: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT".

    Raises:
        JobError: it is none.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not int(port) < 65536:
        raise JobError(f"{listen!r} is no address to serve at: write HOST:PORT, such as 127.0.0.1:9464")
    return host.removeprefix("[").removesuffix("]"), int(port)


@contextmanager
def served(listen: str | None, collect: Callable[[], Iterable[Family]]) -> Iterator[str]:
    """Serve what `collect` makes, and this process's own memory and CPU, while the body runs; yields where.

    Args:
        listen: "HOST:PORT", port 0 for any that is free; None: nothing is served.
        collect: called in another thread for each request; what it raises is logged, and the request gets nothing.

    Raises:
        JobError: no such address, one that is taken, or prometheus_client is not installed.
    """
    if listen is None:
        yield ""
        return
    host, port = address(listen)
    client: Any = extras.load("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(_Collector(collect, extras.load("prometheus_client.core")))
    client.ProcessCollector(registry=registry)
    try:
        server, thread = client.start_http_server(port, host, registry=registry)
    except OSError as error:
        raise JobError(f"metrics cannot be served at {listen}: {error.strerror}; choose another HOST:PORT") from None
    try:
        yield f"http://{host}:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Collector:
    """Turns families into those of prometheus_client."""

    def __init__(self, collect: Callable[[], Iterable[Family]], kinds: Any) -> None:
        self._collect, self._kinds = collect, kinds

    def describe(self) -> list[Any]:
        """Nothing: the names are known when there is something to collect."""
        return []

    def collect(self) -> Iterator[Any]:
        """Families of this moment."""
        try:
            found = list(self._collect())
        except Exception:  # ends in the server's thread, which fails this scrape alone and says nothing to the log
            log.exception("metrics cannot be made")
            raise
        for each in found:
            kind = self._kinds.CounterMetricFamily if each.kind == "counter" else self._kinds.GaugeMetricFamily
            family = kind(each.name, each.about, labels=each.labels)
            for values, value in each.samples:
                family.add_metric(values, value)
            yield family
