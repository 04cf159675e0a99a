"""What is done: the verbs of the `fedquilt` command. Each imports what it needs when it is used."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedquilt.core import JobError, StoreError

ENDED = {"done": 0, "failed": 8, "stopped": 9}


def demo(options: argparse.Namespace) -> int:
    from fedquilt.tools import demo as tool

    return tool.demo(options.out, options.format, options.verbose > 0, options.open)


def prepare(options: argparse.Namespace) -> int:
    import msgspec

    from fedquilt import config, units
    from fedquilt.coordinator import job as running
    from fedquilt.tools.artefacts import prepare as tool

    job, out = _job(options.job), _bundle(options.job, options.out)
    with config.naming(str(options.job)):
        made = tool.prepare(msgspec.to_builtins(job), out, print)
    size = sum(ref.size for ref in made.files.values())
    print(f"{out}: {len(made.files)} files, {units.size(size)}")
    with config.naming(str(options.job)):
        running.first_state(job, made)
    if job.data:
        from fedquilt.data import fitting
        from fedquilt.data.spec import DataSpec

        spec = DataSpec.parse(job.data)
        if spec.synthetic or all(
            Path(each.path).exists() for each in spec.sources or (spec,)
        ):  # else only boards have it
            fitting.require_fit(made.meta, spec)
    return 0


def partition(options: argparse.Namespace) -> int:
    from fedquilt.tools.report import partition as tool

    return tool.main(_job(options.job), options.devices, options.out, options.format)


def run(options: argparse.Namespace) -> int:
    from fedquilt import bundle
    from fedquilt.coordinator import job as running
    from fedquilt.coordinator import settings
    from fedquilt.coordinator.store import Store

    job, folder = _job(options.job), _bundle(options.job, options.bundle)
    job = settings.limited(job, options.max_joules, options.max_bytes, options.max_wall)
    made = bundle.load(folder)
    with Store(options.home) as store:
        id = None if options.new else store.unfinished(job, folder.resolve())
        if id is not None:
            print(f"continuing {id}, which is unfinished (--new begins anew)")
            store.set_status(id, "running")
        else:
            running.require_made_for(job, made)
            running.first_state(job, made)
            id = store.add(job, folder.resolve())
        return _follow(options, store, id)


def serve(options: argparse.Namespace) -> int:
    from fedquilt.coordinator.store import Store
    from fedquilt.coordinator.views.terminal import Console, coordinate

    with Store(options.home) as store:
        if not store.lock():
            raise JobError(f"another coordinator serves {options.home.resolve()} already")
        link = _link(options)
        console = Console(wordy=options.verbose > 0, named=True)
        home = options.home.resolve()
        console.say(
            f"serving {home} on {options.broker}; submit with `fedquilt run JOB --home {home}`, "
            f"watch with `fedquilt logs RUN --follow --home {home}`"
        )
        coordinate(store, link, options.fleet, console)
    return 0


def agent(options: argparse.Namespace) -> int:
    from fedquilt.edge_agent import agent as side
    from fedquilt.edge_agent import credentials, settings

    logging.getLogger().setLevel(min(logging.INFO, logging.getLogger().level))  # a log that tells when all is well
    side.run_agent(credentials.taken(settings.load(options.settings), options.credentials))
    return 0


def flash(options: argparse.Namespace) -> int:
    from fedquilt.tools import flash as tool

    where = tool.Where(options.rootfs, options.ssh, options.tar, tuple(options.ssh_option), options.dry_run)
    if options.uninstall:
        tool.take_out(where, purge=options.purge)
        return 0
    if options.purge:
        raise JobError("--purge goes with --uninstall")
    if options.settings is None or options.target is None:
        raise JobError("flash needs a --target and the board's agent.toml; the README shows one")
    what = tool.What(
        target=options.target,
        settings=options.settings,
        device=options.device,
        token=options.token,
        extras=tuple(options.extras),
        python=options.python,
        interpreter=options.interpreter,
        system_packages=options.system_packages,
        wheels=options.wheels,
        index=options.index,
        constraint=options.constraint,
        refresh=options.refresh,
    )
    tool.flash(what, where)
    return 0


def emulate(options: argparse.Namespace) -> int:
    if not options.systemd:
        from fedquilt.tools import emulate as tool

        if options.boards:
            raise JobError("--boards goes with --systemd")
        return tool.main(options.out, options.mirror, options.rounds, options.format)
    from fedquilt.tools.emulate import rehearsal

    if options.rounds is not None:
        raise JobError("--rounds is for the emulation without --systemd")
    boards = rehearsal.chosen(options.boards)
    if options.enclosed:
        return rehearsal.main(options.out, options.mirror, boards, options.format)
    return rehearsal.enclosed(options.out, options.mirror, options.boards, options.format)


def fleet(options: argparse.Namespace) -> int:
    from fedquilt.tools.simulation import agents as tool

    if options.agents_only and options.link != "broker":
        raise JobError("--agents-only needs --link broker and the coordinator's --broker URL")
    plan = tool.Plan(
        job=_job(options.job),
        bundle=_bundle(options.job, options.bundle),
        home=options.home,
        devices=options.devices,
        fleet=options.fleet,
    )
    if options.link == "memory":
        try:
            return _ended(options, *tool.virtually(plan, wordy=options.verbose > 0))
        except KeyboardInterrupt:
            return _ended(options, "", "running")
    given = _table(options) if options.link == "broker" else None
    ended = tool.really(plan, given, agents_only=options.agents_only, wordy=options.verbose > 0)
    return _ended(options, *ended)


def ca(options: argparse.Namespace) -> int:
    from fedquilt.tools.identity import commands

    match options.what:
        case "init":
            return commands.init(options.ca, options.name, options.crl_url)
        case "issue":
            return commands.issue(options.ca, options.name, options.hosts, options.out, options.days)
        case "list":
            return commands.listing(options.ca, options.format)
    return commands.revoke(options.ca, options.device)


def enrol(options: argparse.Namespace) -> int:
    from fedquilt.tools.identity import commands

    match options.what:
        case "token":
            return commands.token(options.ca, options.device, options.hours, options.out)
        case "serve":
            logging.getLogger("fedquilt.enrol").setLevel(min(logging.INFO, logging.getLogger().level))
            return commands.listen(options.ca, options.listen, options.port, options.hosts, options.days)
        case "sign":
            return commands.sign(options.ca, options.csr, options.device, options.out, options.days)
    return commands.board(
        options.settings, url=options.url, waits=options.wait, request=options.request, accept=options.accept
    )


def broker(options: argparse.Namespace) -> int:
    if options.what == "config":
        from fedquilt.tools.identity import commands

        return commands.config(
            options.ca,
            options.kind,
            options.hosts,
            options.out,
            fleet=options.fleet,
            port=options.listen,
            installed=options.installed,
        )
    from fedquilt.tools import broker as tool

    tool.serve(options.host, options.port, options.password_file)
    return 0


def ls(options: argparse.Namespace) -> int:
    from fedquilt.coordinator.views import log

    with _existing(options) as store:
        rows = [log.summary(row, store) for row in store.all_jobs()]
    _print(options, rows, [log.line(row) for row in rows])
    return 0


def logs(options: argparse.Namespace) -> int:
    from fedquilt.coordinator.views import terminal as console

    with _existing(options) as store:
        console.tell(store, store.job(options.run).id, follow=options.follow, json=options.format == "json")
    return 0


def why(options: argparse.Namespace) -> int:
    from fedquilt.coordinator.views import why as reasons

    with _existing(options) as store:
        found = reasons.of(store, options.run)
    _print(
        options,
        reasons.select(found, options.round, options.device),
        reasons.lines(found, options.round, options.device),
    )
    return 0


def stop(options: argparse.Namespace) -> int:
    from fedquilt.coordinator.facts import Ended

    with _existing(options) as store:
        row = store.job(options.run)
        if row.status not in ("queued", "running", "stopping"):
            raise JobError(f"{row.id} is {row.status} already")
        if store.served():
            store.set_status(row.id, "stopping")
            print(f"{row.id} stops at the coordinator's next look at its store (within a second or so)")
        else:
            status = store.end(row.id, Ended("stopped", "by request"))
            print(f"{row.id} is {status}; no coordinator was running it")
        return 0


def resume(options: argparse.Namespace) -> int:
    with _existing(options) as store:
        row = store.job(options.run)
        if row.status == "done":
            raise JobError(f"{row.id} is done; `{_export(options, row.id)}` writes its result")
        if row.origin == "fleet":
            raise JobError(
                f"{row.id} is a simulated fleet's: `fedquilt fleet JOB --home {options.home}` goes on with it"
            )
        store.set_status(row.id, "running")
        return _follow(options, store, row.id)


def export(options: argparse.Namespace) -> int:
    from fedquilt.tools.artefacts import export as tool

    with _existing(options) as store:
        print(tool.export(store, options.run, options.out))
    return 0


def evaluate(options: argparse.Namespace) -> int:
    from fedquilt.coordinator.views import scores
    from fedquilt.tools.experiments import evaluate as evaluator

    def say(score: scores.Score) -> None:
        if options.format == "text":
            print(evaluator.line(score), flush=True)

    with _existing(options) as store:
        found = evaluator.evaluate(store, options.run, follow=options.follow, say=say)
    if options.format == "json":
        _print(options, found, [])
    return 0


def report(options: argparse.Namespace) -> int:
    from fedquilt.tools import report as tool

    with _existing(options) as store:
        print(f"{tool.main(store, options.run, options.out)}: {store.job(options.run).id}")
    return 0


def compare(options: argparse.Namespace) -> int:
    from fedquilt.tools.experiments import compare as tool

    return tool.main(
        _job(options.job),
        _bundle(options.job, options.bundle),
        options.out,
        names=options.methods or (),
        seeds=options.seeds,
        rounds=options.rounds,
        target=options.target,
        on=options.on,
        changes=tool.parse_changes(options.set),
        workers=options.workers,
        format=options.format,
    )


def cards(options: argparse.Namespace) -> int:
    from fedquilt.tools.experiments import method_pages as tool

    tool.main(options.method, options.out, options.format)
    return 0


def reproduce(options: argparse.Namespace) -> int:
    from fedquilt.tools.experiments import papers as tool

    return tool.main(
        options.table,
        seeds=options.seeds,
        rounds=options.rounds,
        folder=options.data,
        columns=options.columns,
        out=options.out,
        picture=options.picture,
        format=options.format,
    )


def audit(options: argparse.Namespace) -> int:
    from fedquilt.tools import audit as tool

    wanted = {
        "count": options.images,
        "size": options.size or 0,
        "steps": options.steps,
        "noise": options.noise,
        "seed": options.seed,
    }
    return tool.main(
        options.data, options.out, options.format, wanted, lambda line: print(line, file=sys.stderr, flush=True)
    )


def run_model(options: argparse.Namespace) -> int:
    from fedquilt.tools.artefacts import run_model as tool

    return tool.main(options.model, options.images, options.format)


def record(options: argparse.Namespace) -> int:
    from fedquilt.tools.board import record as tool

    return tool.main(
        options.out,
        options.minutes,
        options.points,
        options.socket,
        root=options.root,
        dry_run=options.dry_run,
        format=options.format,
    )


def doctor(options: argparse.Namespace) -> int:
    from fedquilt.tools import doctor as tool

    if options.broker is None and any((options.ca, options.cert, options.key, options.password_file)):
        raise JobError("--ca, --cert, --key and --password-file go with --broker URL")
    wanted = tool.Wanted(
        settings=options.settings,
        home=options.home,
        broker=None if options.broker is None else _table(options),
        fleet=options.fleet,
        root=options.root,
    )
    return tool.main(wanted, options.format)


def clocks(options: argparse.Namespace) -> int:
    if options.what == "serve":
        from fedquilt.edge_agent.clocks import helper

        helper.serve(
            options.root,
            options.socket,
            options.state,
            group=options.group,
            watchdog_s=options.watchdog,
            hottest_c=options.hottest,
            dry_run=options.dry_run,
        )
        return 0
    from fedquilt.tools.board import clocks as tool

    if options.what == "status":
        return tool.status(options.root, options.socket, options.format)
    return tool.hold(options.point, options.root, options.socket, dry_run=options.dry_run, seconds=options.seconds)


def bench(options: argparse.Namespace) -> int:
    from fedquilt.tools import bench as tool

    ablating = options.what == "stitch" and options.ablate is not None
    for name, allowed, where in (
        ("size", options.what in ("stitch", "memory") and not ablating, "`bench stitch` and `bench memory`"),
        ("ablate", options.what == "stitch", "`bench stitch`"),
        ("data", options.what == "sim", "`bench sim`"),
        ("beside", options.what == "sim", "`bench sim`"),
        *((name, ablating, "`bench stitch --ablate`") for name in ("bundle", "alpha", "seeds", "only", "out")),
    ):
        if getattr(options, name) is not None and not allowed:
            raise JobError(f"--{'with' if name == 'beside' else name} is an option of {where}: leave it out here")
    if ablating:
        return _ablate(options)
    if options.what != "sim":
        return tool.main(options.what, options.format, options.size or ())
    if options.data is None:
        raise JobError("bench sim wants --data: a folder of IDX images of 28x28, such as MNIST's raw folder")
    return tool.main("sim", options.format, given={"path": options.data, "beside": options.beside or ()})


def _ablate(options: argparse.Namespace) -> int:
    from fedquilt.tools import demo as example
    from fedquilt.tools.bench import ablate

    own = options.ablate != Path()
    job = options.ablate if own else example.HERE / "job.toml"
    return ablate.main(
        _job(job),
        _bundle(job, options.bundle) if own else options.bundle or example.HERE / "bundle",
        options.out or Path("fedquilt-ablation"),
        alphas=options.alpha or (),
        seeds=options.seeds or (0, 1, 2),
        only=options.only or (),
        format=options.format,
    )


# -- shared by verbs ------------------------------------------------------------------------------


def _existing(options: argparse.Namespace) -> Any:
    """The store in --home, which must be there already."""
    from fedquilt.coordinator.store import Store

    if not (options.home / "fedquilt.db").is_file():
        raise StoreError(
            f"no runs in {options.home}: `fedquilt run` or `fleet` begins one, --home names another folder"
        )
    return Store(options.home)


def _job(path: Path) -> Any:
    """The job in a file; what only tools read of it is checked here, where its file is known.

    Raises:
        JobError: as `coordinator.settings.load`, or a key of [data] or [test] that is wrong.
    """
    from fedquilt import config
    from fedquilt.coordinator import settings
    from fedquilt.data.spec import DataSpec

    job = settings.load(path)
    with config.naming(str(path)):
        if job.data:
            DataSpec.parse(job.data)
        if job.test:
            from fedquilt.coordinator.views import scores

            DataSpec.parse(scores.test_table(job), "[test]")
    return job


def _bundle(job: Path, given: Path | None) -> Path:
    return given or job.with_name(job.stem + ".bundle")


def _table(options: argparse.Namespace) -> dict[str, Any]:
    """The broker as an agent.toml's [broker] table."""
    files = {"ca": options.ca, "cert": options.cert, "key": options.key, "password_file": options.password_file}
    return {"url": options.broker, **{name: str(path.resolve()) for name, path in files.items() if path is not None}}


def _link(options: argparse.Namespace) -> Any:
    """The coordinator's link; not connected yet: a daemon waits for its broker, a command asks for it."""
    from fedquilt import wire
    from fedquilt.transport.mqtt import Broker, MqttLink

    will = (wire.Topics(options.fleet).coord, wire.encode(wire.CoordState(online=False)))
    return MqttLink(Broker.parse(**_table(options)), f"fedquilt-coordinator-{options.fleet}", will)


def _follow(options: argparse.Namespace, store: Any, id: str) -> int:
    """Run a job to its end: here, unless a coordinator serves this home already."""
    from fedquilt.coordinator.views import terminal as console

    print(f"{id}; from elsewhere: `fedquilt logs {id} --follow --home {options.home.resolve()}`", flush=True)
    if store.lock():
        link = _link(options)
        link.connect(timeout_s=5.0)
        console.coordinate(store, link, options.fleet, console.Console(wordy=options.verbose > 0), only=id)
    else:
        console.tell(store, id, follow=True)
    return _ended(options, id, store.status(id))


def _ended(options: argparse.Namespace, id: str, status: str) -> int:
    """Say what can be done now; the exit code."""
    if status == "running":
        again = f"fedquilt fleet {options.job}" if options.command is fleet else f"fedquilt resume {id}"
        print(f"interrupted; `{again} --home {options.home}` continues it")
    elif status == "done" and id:
        print(f"done; `{_export(options, id)}` writes its result")
    return ENDED.get(status, 130)


def _export(options: argparse.Namespace, id: str) -> str:
    return f"fedquilt export {id} --home {options.home} --out FILE"


def _print(options: argparse.Namespace, rows: Any, lines: Sequence[str]) -> None:
    if options.format == "json":
        import msgspec

        print(msgspec.json.encode(rows).decode())
    else:
        print("\n".join(lines))
