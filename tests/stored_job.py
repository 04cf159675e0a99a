"""The job that tests of the store and of the log keep in a home."""

from __future__ import annotations

from fedquilt.coordinator import settings

JOB = settings.parse_job({"name": "digits", "method": "fedavg"})
