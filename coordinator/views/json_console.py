"""Console output as log records, in JSON after `host.logs.use_json_logs`."""

from __future__ import annotations

import logging

from fedquilt.coordinator.job_view import JobView
from fedquilt.coordinator.rounds.events import AnyEvent
from fedquilt.coordinator.views import event_messages as sentences
from fedquilt.coordinator.views.terminal import Console
from fedquilt.host.logs import log_ids

log = logging.getLogger("fedquilt.rounds")


class JsonConsole(Console):
    def __init__(self) -> None:
        super().__init__(wordy=True, named=True, live=False)
        log.setLevel(min(logging.INFO, logging.getLogger().level))  # they are what it is for

    def observe(self, job: JobView, fact: AnyEvent) -> None:
        update = getattr(fact, "update", None)
        device = getattr(fact, "device", None) or getattr(update, "device", None)
        ids = log_ids(run=job.id, round=getattr(fact, "round", None), device=device, fact=type(fact).__name__)
        level = logging.ERROR if getattr(fact, "status", "") == "failed" else logging.INFO
        log.log(level, "%s", "; ".join(sentences.format_single_event(fact)), extra=ids)

    def report(self, first: str, *more: str) -> None:
        log.info("%s", "; ".join((first, *more)))
