"""`fedquilt.simulate`: a job on a simulated fleet, through the coordinator's own rounds."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from fedquilt import extras, metrics, tracking
from fedquilt.api import live
from fedquilt.api.job import Job
from fedquilt.api.run import Run
from fedquilt.coordinator import settings
from fedquilt.core import JobError
from fedquilt.tools.report import columns

if TYPE_CHECKING:
    from fedquilt.tools.simulation.simulated_job import Simulation
    from fedquilt.trackers import Tracker

PREPARED: Final = ("model", "schedule", "input", "data", "labels", "donors", "int8")


@extras.named()
def simulate(
    job: Job,
    *,
    seed: int | None = None,
    workers: int | None = 1,
    engine: str = "auto",
    mixed: bool = False,
    home: str | Path | None = None,
    evaluate: bool = True,
    trackers: Sequence[Tracker] = (),
    progress: bool | None = None,
) -> Run:
    """Run a job to its end on the simulated fleet of its [fleet] table; returns the run.

    Rounds, deadlines, budgets, governors and codecs are the coordinator's and the agents' own; only boards and time
    are simulated. Every state is, bit for bit, that of `fedquilt fleet` with the same job, for any number of workers.

    Args:
        job: with a [data] table.
        seed: in place of the job's; the partition is drawn by it too, unless the job's data has a seed of its own.
        workers: processes that train devices; None: one for each core, of this machine or of the Ray cluster.
        engine: "pool": processes of this machine; "ray": those of the Ray cluster that it is a node of, or of a Ray
            that is started for the run; "ray://HOST:PORT": of a cluster elsewhere; "auto": a pool, unless RAY_ADDRESS
            says that this process belongs to a cluster.
        mixed: permit machines that differ in processor, GPU or libraries: nodes of a cluster, or those of an
            interrupted run and of what goes on with it. Results then do not repeat bit for bit.
        home: folder that keeps the run, and its bundle; a run that was interrupted there goes on. None: a temporary
            one that goes with the run.
        evaluate: where the job has no [check], evaluate the global model beside every round, which costs the devices
            nothing: on their held-out shares, and on the test set if the data has one.
        trackers: receive the job, each finished round and the end (`fedquilt.trackers`). An error of one is logged
            once, with its name, and the run goes on.
        progress: None: a line on a terminal, a cell's output in a notebook, else nothing; True: a line in any case;
            False: nothing.

    Raises:
        JobError: `job` is not a fq.Job, or has no [data], or a tracker is none, or a key is wrong, or a library is not
            installed, or machines differ, or the run has failed; gives the reason.
        DataError: the data cannot be read, or the network cannot take them.
        ModelError: the network cannot be loaded, or the method cannot train it.
        StoreError: the home cannot be written.
    """
    from fedquilt.tools.artefacts import prepare
    from fedquilt.tools.experiments import watched_run
    from fedquilt.tools.simulation.scratch import Scratch

    if not isinstance(job, Job):
        raise JobError(f"simulate takes a fq.Job, not {job!r}; of a job file: fq.simulate(fq.Job.read('job.toml'))")
    told = tracking.Audience(tracking.require(trackers))
    wanted = seeded(job, seed)
    made = watched_run.evaluated(wanted) if evaluate else wanted
    if not made.data:
        raise JobError("a simulated fleet needs the job's data, as in fq.Job(..., data=fq.Data('digits.npz'))")
    with contextlib.ExitStack() as stack:
        place = Path(home) if home is not None else stack.enter_context(Scratch())
        bundle = place / "bundles" / digest(made)
        prepare.prepare_and_check(made, bundle)
        with contextlib.closing(live.display(progress)) as shown:
            watch = _Watch(made, place, told, shown.show)
            try:
                id = watched_run.play(
                    made,
                    bundle,
                    place,
                    workers=workers,
                    engine=engine,
                    mixed=mixed,
                    begun=watch.begin,
                    watch=watch,
                )
                watch.tell(ended=True)
            finally:
                watch.end()
        run = Run(place, id)
        if home is None:
            weakref.finalize(run, stack.pop_all().close)  # a temporary home lasts as long as its run
    return run


def seeded(job: Job, seed: int | None) -> settings.Job:
    """The job as the coordinator's type, with `seed` in place of its own if given."""
    return job.settings if seed is None else job.replace(seed=seed).settings


def digest(job: settings.Job) -> str:
    """Folder name of a job's bundle in a home: a hash of everything it is prepared from."""
    parts = {name: getattr(job, name) for name in PREPARED}
    return f"{job.name}-{hashlib.sha256(msgspec.json.encode(parts, order='sorted')).hexdigest()[:12]}"


class _Watch:
    """Shows a run's progress and reports its rounds to trackers."""

    def __init__(self, job: settings.Job, home: Path, told: tracking.Audience, show: Callable[[str], None]) -> None:
        self._job, self._home, self._told, self._show = job, home, told, show
        self._follower: tracking.Follower | None = None
        self._run = ""
        self._metric, self._reached = columns.metric_of(job), ""

    def begin(self, run: str) -> None:
        """Note the run's id and start the trackers."""
        self._run, self._follower = run, tracking.Follower(self._home, run)
        self._told.start(Job.of(self._job), run)

    def __call__(self, simulation: Simulation) -> None:
        self.tell(ended=False)
        self._show(f"{simulation.run}: round {simulation.done} of {self._job.rounds}{self._reached}")

    def end(self) -> None:
        """Report the end of the run to all trackers that have begun, however it ended."""
        self._told.end(Run(self._home, self._run))

    def tell(self, *, ended: bool) -> None:
        """Report the rounds finished since the last call to the trackers; with `ended` all that are left."""
        for row in self._follower.new(ended=ended) if self._follower is not None else ():
            if row[self._metric.name] is not None:
                self._reached = f", {self._metric.title} {metrics.shown(self._metric, row[self._metric.name], 1)}"
            self._told.round(row)
