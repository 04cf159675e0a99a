"""`fedquilt why`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import argument, option, verb


@verb()
@options.run_argument
@argument("number", "Show this round only, counted from 1.", type=options.WHOLE, metavar="[ROUND]", required=False)
@option("--device", type=options.NAME, metavar="D", help="Show this device only.")
@options.home_option
@options.format_option
def why(run: str, number: int | None, device: str | None, home: Path, format: str) -> None:
    """Explain the selection of devices in each round, and the outcome of their tasks."""
    from fedquilt.coordinator.views import event_messages, wait_reasons
    from fedquilt.coordinator.views import round_outcomes as reasons

    with home_access.open_existing_home(home) as store:
        parts, row = reasons.load_outcomes(store, run), store.find_job(run)
        held_up = wait_reasons.describe_wait(row, store)
        warning = reasons.warn_of_weights(store, row.job, (fact for _, _, fact in store.read_events(row.id)))
    whole = number is None and device is None
    told = [f"{row.id} waits for {held_up}"] if held_up and whole else []
    told += [warning] if warning and whole else []
    if whole and (best := parts.summary.state.best) is not None:
        told.append(f"best evaluation: {best.describe()}, {best.without_gain} later without a gain")
    if whole and parts.summary.state.phase == row.status == "failed":
        told += event_messages.format_end("failed", parts.summary.state.reason)
    home_access.print_rows(
        format,
        reasons.filter_outcomes(parts.found, number, device),
        [*reasons.format_outcomes(parts, number, device), *told],
    )
