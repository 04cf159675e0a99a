"""`fedquilt run`."""

from __future__ import annotations

from pathlib import Path

from fedquilt.cli import home_access, job_files, options
from fedquilt.cli.commands import verb


@verb()
@options.job_argument
@options.home_option
@options.blob_options
@options.broker_options()
def run(
    job: Path,
    home: Path,
    blobs: options.BlobOptions,
    broker: options.BrokerOptions,
) -> int:
    """Run a job to its end, here or on the serving coordinator, or arm its [trigger]."""
    from fedquilt.coordinator import settings
    from fedquilt.coordinator.storage.store import ARMED, Store
    from fedquilt.formats import job_bundle as bundles

    read = home_access.load_job(job)
    settings.require_no_adversaries(read)
    folder = job_files.prepare_if_changed(job, read)
    made = bundles.load_bundle(folder)
    with Store(home) as store:
        id = store.find_unfinished(read, folder.resolve())
        if id is not None and store.stored_status(id) == ARMED:
            print(f"{id} is armed already (`fedquilt stop {id}` ends that)")
            return 0
        if id is None or read.trigger is not None:
            settings.require_matching_bundle(read, made)
            settings.create_initial_state(read, made)
        if read.trigger is not None:
            id = store.add_job(read, folder.resolve())
            print(f"{id} is armed: `fedquilt serve --home {home}` starts runs of it; `fedquilt stop {id}` ends that")
            return 0

        def submit() -> str:
            id, found = store.find_or_add_job(read, folder.resolve())
            if found:
                print(f"continuing {id}, which is unfinished (`fedquilt prune {id}` deletes it, for a new one)")
                store.set_status(id, "running")
            return id

        return home_access.run_to_end(home, broker, blobs, store, submit)
