"""`fedquilt run`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import homes, options
from fedquilt.cli.commands import option, verb

LIMITS = "Limits: the run ends after the round in which one is reached; [stop] in the job"


@verb()
@options.job_argument
@options.bundle
@option("--new", is_flag=True, help="Start a new run although one of this very job is unfinished.")
@option(
    "--max-joules",
    type=options.ABOVE_0,
    metavar="J",
    help="Joules that all devices with a meter may spend, gross.",
    group=LIMITS,
)
@option(
    "--max-bytes",
    type=options.POSITIVE,
    metavar="B",
    help="Bytes of tensors and models that may travel, down and up together.",
    group=LIMITS,
)
@option(
    "--max-wall",
    type=options.ABOVE_0,
    metavar="S",
    help="Seconds that a coordinator may spend on the run.",
    group=LIMITS,
)
@options.home
@options.blobs
@options.broker()
def run(
    job: Path,
    bundle: Path | None,
    new: bool,
    max_joules: float | None,
    max_bytes: int | None,
    max_wall: float | None,
    home: Path,
    blobs: options.Blobs,
    broker: options.Broker,
) -> int:
    """Run a job and follow it to its end, here or on the coordinator that serves --home; arm one with a [trigger]."""
    from fedquilt import bundle as bundles
    from fedquilt.coordinator import preflight, settings
    from fedquilt.coordinator.store import ARMED, Store

    read, folder = homes.load_job(job), homes.bundle_of(job, bundle)
    read = settings.limited(read, max_joules, max_bytes, max_wall)
    settings.require_honest(read)
    made = bundles.load(folder)
    with Store(home) as store:
        id = None if new else store.unfinished(read, folder.resolve())
        if id is not None and store.status(id) == ARMED:
            print(f"{id} is armed already (--new arms another one)")
            return 0
        if id is None or read.trigger is not None:
            preflight.require_made_for(read, made)
            preflight.first_state(read, made)
        if read.trigger is not None:
            id = store.add(read, folder.resolve())
            print(f"{id} is armed: `fedquilt serve --home {home}` starts runs of it; `fedquilt stop {id}` ends that")
            return 0

        def submit() -> str:
            if new:
                return store.add(read, folder.resolve())
            id, found = store.continue_or_add(read, folder.resolve())
            if found:
                print(f"continuing {id}, which is unfinished (--new begins anew)")
                store.set_status(id, "running")
            return id

        return homes.follow(home, broker, blobs, store, submit)
