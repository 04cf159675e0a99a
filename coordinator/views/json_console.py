"""A coordinator's console whose lines are log records: with `logs.as_json`, JSON with run, round and device."""

from __future__ import annotations

import logging

from fedquilt.coordinator.facts import AnyFact
from fedquilt.coordinator.shown import Shown
from fedquilt.coordinator.views import log as sentences
from fedquilt.coordinator.views.terminal import Console
from fedquilt.logs import about

log = logging.getLogger("fedquilt.rounds")


class JsonConsole(Console):
    """Logs every fact of every job, and whatever else a console says."""

    def __init__(self) -> None:
        super().__init__(wordy=True, named=True)
        log.setLevel(min(logging.INFO, logging.getLogger().level))  # they are what it is for

    def observe(self, job: Shown, fact: AnyFact) -> None:
        """Log a fact with its ids."""
        update = getattr(fact, "update", None)
        device = getattr(fact, "device", None) or getattr(update, "device", None)
        ids = about(run=job.id, round=getattr(fact, "round", None), device=device, fact=type(fact).__name__)
        level = logging.ERROR if getattr(fact, "status", "") == "failed" else logging.INFO
        log.log(level, "%s", "; ".join(sentences.sentences(fact)), extra=ids)

    def say(self, first: str, *more: str) -> None:
        """Log a sentence."""
        log.info("%s", "; ".join((first, *more)))
