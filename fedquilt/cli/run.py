"""`fedquilt run`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, options
from fedquilt.cli.commands import option, verb

LIMITS = "Limits: the run ends after the round in which one is reached; [stop] in the job"


@verb()
@options.job_argument
@options.bundle_option
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
@options.home_option
@options.blob_options
@options.broker_options()
def run(
    job: Path,
    bundle: Path | None,
    new: bool,
    max_joules: float | None,
    max_bytes: int | None,
    max_wall: float | None,
    home: Path,
    blobs: options.BlobOptions,
    broker: options.BrokerOptions,
) -> int:
    """Run a job to its end, here or on the serving coordinator, or arm its [trigger]."""
    from fedquilt.coordinator import settings
    from fedquilt.coordinator.storage.store import ARMED, Store
    from fedquilt.coordinator.updates import job_validation
    from fedquilt.formats import job_bundle as bundles

    read, folder = home_access.load_job(job), home_access.bundle_folder(job, bundle)
    read = settings.with_limits(read, max_joules, max_bytes, max_wall)
    settings.require_no_adversaries(read)
    made = bundles.load_bundle(folder)
    with Store(home) as store:
        id = None if new else store.find_unfinished(read, folder.resolve())
        if id is not None and store.stored_status(id) == ARMED:
            print(f"{id} is armed already (--new arms another one)")
            return 0
        if id is None or read.trigger is not None:
            job_validation.require_matching_bundle(read, made)
            job_validation.create_initial_state(read, made)
        if read.trigger is not None:
            id = store.add_job(read, folder.resolve())
            print(f"{id} is armed: `fedquilt serve --home {home}` starts runs of it; `fedquilt stop {id}` ends that")
            return 0

        def submit() -> str:
            if new:
                return store.add_job(read, folder.resolve())
            id, found = store.find_or_add_job(read, folder.resolve())
            if found:
                print(f"continuing {id}, which is unfinished (--new begins anew)")
                store.set_status(id, "running")
            return id

        return home_access.run_to_end(home, broker, blobs, store, submit)
