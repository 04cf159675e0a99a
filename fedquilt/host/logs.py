"""Structured logs: one JSON object per line, with the ids of run, round and device.

Log calls attach the ids: `log.warning("...", extra=log_ids(run=..., device=...))`. Plain-text logs omit them.
"""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import Any, Final

import msgspec

PLAIN: Final = "%(levelname)s %(name)s: %(message)s"
IDS: Final = ("run", "round", "device", "fact")


def log_ids(*, round: int | None = None, **ids: str | None) -> dict[str, str | int]:
    """Return the ids that are not None as `extra` of a logging call. Logged rounds count from 1."""
    return ({} if round is None else {"round": round + 1}) | {
        name: value for name, value in ids.items() if value is not None
    }


class JsonFormatter(logging.Formatter):
    def __init__(self, **ids: str) -> None:
        super().__init__()
        self._ids = ids

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._ids,
        }
        fields |= {name: value for name in IDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(fields).decode()
        except (UnicodeEncodeError, TypeError):  # text that is not Unicode, or an id of another type
            return msgspec.json.encode({key: _to_json_value(value) for key, value in fields.items()}).decode()


def _to_json_value(value: object) -> int | str:
    return value if isinstance(value, int) else str(value).encode(errors="backslashreplace").decode()


def use_json_logs(**ids: str) -> None:
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter(**ids))
