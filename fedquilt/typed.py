"""What is typed: every verb of the `fedquilt` command and its options."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from fedquilt import __version__, verbs

EPILOG = """exit codes: 0 done; 1 an error of fedquilt's own; 2 the job file, a setting or the command line; 3 data;
4 a network or donor; 5 the broker; 6 a folder, the store or a full disk; 7 memory; 8 the job failed, or clocks;
9 the job was stopped; 10 doctor has warnings, 11 errors; 130 interrupted; 141 the reader of its output went away"""


def parser() -> argparse.ArgumentParser:
    """Every verb and option there is."""
    top = argparse.ArgumentParser(
        prog="fedquilt",
        description="Federated learning on real edge boards.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fedquilt {__version__}")
    top.add_argument("-v", "--verbose", action="count", default=0, help="say more; twice for everything")
    subparsers = top.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, command: Any, help: str) -> argparse.ArgumentParser:
        made = subparsers.add_parser(name, help=help, description=help)
        made.set_defaults(command=command)
        return made

    one = verb("demo", verbs.demo, "see a federation of simulated boards stitch a network for real handwritten digits")
    one.add_argument(
        "--out", type=Path, default=Path("fedquilt-demo"), help="folder for what it makes (default: %(default)s)"
    )
    one.add_argument("--open", action="store_true", help="open the report in a browser at the end")
    one.add_argument("-v", dest="verbose", action="count", default=argparse.SUPPRESS, help="print every round")
    _format(one)

    one = verb("prepare", verbs.prepare, "make a job's bundle: donors split into blocks, or a network's first weights")
    one.add_argument("job", type=Path)
    one.add_argument("--out", type=Path, help="the bundle's folder (default: JOB.bundle beside the job file)")

    one = verb("partition", verbs.partition, "show how a job's [data] shares examples out among its devices")
    one.add_argument("job", type=Path)
    one.add_argument("--devices", type=_positive, help="how many (default: the job's fleet.devices)")
    one.add_argument("--out", type=Path, metavar="FILE.svg", help="draw it: a dot for each device and class")
    _format(one)

    one = verb("run", verbs.run, "run a job and follow it to its end, here or on the coordinator that serves --home")
    one.add_argument("job", type=Path)
    one.add_argument("--bundle", type=Path, help="default: JOB.bundle beside the job file")
    one.add_argument("--new", action="store_true", help="begin anew although a run of this very job is unfinished")
    group = one.add_argument_group("limits", "the run ends after the round in which one is reached; [stop] in the job")
    group.add_argument("--max-joules", type=_above_0, metavar="J", help="gross, of all devices that have a meter")
    group.add_argument("--max-bytes", type=_positive, metavar="B", help="of tensors and models, down and up")
    group.add_argument("--max-wall", type=_above_0, metavar="S", help="seconds that a coordinator is at it")
    _home(one)
    _broker(one)

    one = verb("serve", verbs.serve, "be the coordinator: run what is submitted to --home, in turn, until told to stop")
    _home(one)
    _broker(one)

    one = verb("agent", verbs.agent, "be the agent of this board, as agent.toml says")
    one.add_argument("settings", type=Path)
    one.add_argument(
        "--credentials", type=Path, metavar="DIR", help="take the broker's files from here, by their names (systemd's)"
    )

    _flash(
        verb(
            "flash", verbs.flash, "put an agent onto a board: a mounted root, over SSH, or as an archive to take there"
        )
    )

    one = verb(
        "emulate", verbs.emulate, "flash an arm64 Debian that qemu runs here, and let its agent stitch; needs root"
    )
    one.add_argument(
        "--out",
        type=Path,
        default=Path("fedquilt-emulated"),
        help="folder for the system and logs (default: %(default)s)",
    )
    one.add_argument("--mirror", metavar="URL", help="of Debian (default: the one that apt uses here)")
    one.add_argument("--rounds", type=_positive, help="at most (default: until the network is stitched)")
    one.add_argument(
        "--systemd",
        action="store_true",
        help="instead, boot a flashed Debian on this machine's own processor, with systemd and a Jetson's files",
    )
    one.add_argument(
        "--boards",
        nargs="+",
        metavar="BOARD[:JETPACK]",
        default=[],
        help="with --systemd: which are to come up; everything else is tried on the first (default: all there are)",
    )
    one.add_argument("--enclosed", action="store_true", help=argparse.SUPPRESS)  # the rehearsal's own call of itself
    _format(one)

    one = verb("fleet", verbs.fleet, "run a job on simulated boards that run the agents' own code")
    one.add_argument("job", type=Path)
    one.add_argument("--bundle", type=Path, help="default: JOB.bundle beside the job file")
    one.add_argument("--devices", type=_positive, help="how many boards (default: the job's fleet.devices)")
    one.add_argument(
        "--link",
        default="embedded",
        choices=("embedded", "memory", "broker"),
        help="embedded: agents as processes, a broker of our own; broker: the same over --broker; "
        "memory: all in this process on virtual time (default: %(default)s)",
    )
    one.add_argument("--agents-only", action="store_true", help="with --link broker: the coordinator runs elsewhere")
    _home(one)
    _broker(one)

    one = verb("broker", verbs.broker, "run the embedded MQTT broker (3.1.1), for tests and small networks")
    one.add_argument("--host", default="127.0.0.1")
    one.add_argument("--port", type=int, default=1883)
    one.add_argument("--password-file", type=Path, help="required unless bound to loopback")
    _broker_config(one.add_subparsers(dest="what", metavar="config"))

    _ca(verb("ca", verbs.ca, "be a fleet's certificate authority: who may join it"))
    _enrol(verb("enrol", verbs.enrol, "give a board its certificate: by a one-time token, or carried by hand"))

    one = verb("ls", verbs.ls, "list the runs in --home")
    _home(one)
    _format(one)

    one = verb("logs", verbs.logs, "what happened in a run, round by round")
    one.add_argument("run", help="a run's id, or a job's name for its latest run")
    one.add_argument("--follow", action="store_true", help="go on until the run has ended")
    _home(one)
    _format(one)

    one = verb("why", verbs.why, "why devices were or were not chosen in a run's rounds, and what became of them")
    one.add_argument("run", help="a run's id, or a job's name for its latest run")
    one.add_argument("--round", type=int, metavar="N", help="of this round alone")
    one.add_argument("--device", type=_name, metavar="D", help="of this device alone")
    _home(one)
    _format(one)

    for name, command, help in (
        ("stop", verbs.stop, "stop a run after what is being written; `resume` continues it"),
        ("resume", verbs.resume, "continue a stopped, failed or interrupted run where it was"),
    ):
        one = verb(name, command, help)
        one.add_argument("run", help="a run's id, or a job's name for its latest run")
        _home(one)
        if name == "resume":
            _broker(one)

    one = verb(
        "export", verbs.export, "write a run's result: a stitched network as one ONNX file, weights as safetensors"
    )
    one.add_argument("run", help="a run's id, or a job's name for its latest run")
    one.add_argument("--out", type=Path, required=True)
    _home(one)

    one = verb("evaluate", verbs.evaluate, "a run's global model on the job's test set, which no device has")
    one.add_argument("run", help="a run's id, or a job's name for its latest run")
    one.add_argument("--follow", action="store_true", help="every round's as it comes, until the run has ended")
    _home(one)
    _format(one)

    one = verb("report", verbs.report, "write one HTML page about a run: accuracy, time, energy, memory, who took part")
    one.add_argument("run", help="a run's id, or a job's name for its latest run")
    one.add_argument("--out", type=Path, metavar="FILE", help="default: RUN.html")
    _home(one)

    one = verb(
        "compare", verbs.compare, "run several methods with several seeds on a simulated fleet, beside each other"
    )
    one.add_argument("job", type=Path)
    one.add_argument("--bundle", type=Path, help="default: JOB.bundle beside the job file")
    one.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="default: the job's own and those of its [compare] tables"
    )
    one.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    one.add_argument("--rounds", type=_positive, help="of every run (default: the job's)")
    one.add_argument("--target", type=_share, metavar="A", help="accuracy, 0 to 1, to which costs are counted")
    one.add_argument(
        "--on",
        choices=("test", "held"),
        default="test",
        help="accuracy on the test set, or on held-out shares, for methods that leave each device its own network",
    )
    one.add_argument(
        "--set", nargs="+", default=[], metavar="METHOD.PARAM=VALUE", help="parameters, over [compare.METHOD]"
    )
    one.add_argument("--workers", type=_positive, help="processes (default: one for each core)")
    one.add_argument(
        "--out", type=Path, default=Path("fedquilt-compare"), help="finished runs, plots, page (default: %(default)s)"
    )
    _format(one)

    one = verb("methods", verbs.cards, "list the methods, or tell one's paper, deviations and parameters")
    one.add_argument("method", nargs="?", metavar="METHOD")
    one.add_argument("--out", type=Path, metavar="FOLDER", help="write a page for each")
    _format(one)

    one = verb(
        "reproduce", verbs.reproduce, "run a paper's table again, its numbers beside ours; without one, list them"
    )
    one.add_argument("table", nargs="?", metavar="TABLE")
    one.add_argument("--data", type=Path, metavar="FOLDER", help="where a table wants real data")
    one.add_argument("--seeds", type=int, nargs="+", help="default: the table's own")
    one.add_argument("--rounds", type=_positive, help="fewer than the paper's")
    one.add_argument("--columns", nargs="+", metavar="NAME", help="these alone, of a table whose columns are runs")
    one.add_argument("--out", type=Path, metavar="FILE", help="the result as JSON, every curve in it")
    one.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw it, where the table has a picture")
    _format(one)

    one = verb("audit", verbs.audit, "rebuild a device's pictures from what methods have it upload, and tell how well")
    one.add_argument("--data", type=Path, required=True, help="images: a folder, .npz or IDX files")
    one.add_argument("--images", type=_positive, default=4, metavar="N", help="(default: %(default)s)")
    one.add_argument("--size", type=_positive, help="pixels to scale images to (default: as they are)")
    one.add_argument("--steps", type=_positive, default=300, help="of the attack at most (default: %(default)s)")
    one.add_argument("--noise", type=_above_0, default=0.001, help="on FedAvg's gradients (default: %(default)s)")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--out", type=Path, default=Path("fedquilt-audit.svg"), metavar="FILE.svg")
    _format(one)

    one = verb("run-model", verbs.run_model, "classify a folder of images, or an .npz, with an exported ONNX network")
    one.add_argument("model", type=Path)
    one.add_argument("images", type=Path)
    _format(one)

    one = verb(
        "record", verbs.record, "measure this board's speed and power at some of its clocks, and write its profile"
    )
    one.add_argument("--out", type=Path, help="default: BOARD.toml")
    one.add_argument("--minutes", type=_seconds, default=5.0, metavar="M", help="in all (default: %(default)g)")
    one.add_argument(
        "--points", nargs="+", metavar="POINT", help="modes, or cpu=1.2GHz,gpu=850MHz (default: the most telling ones)"
    )
    one.add_argument(
        "--socket",
        type=Path,
        default=Path("/run/fedquilt/clocks.sock"),
        help="the clock helper's; without one, only the point the board is at (default: %(default)s)",
    )
    one.add_argument("--root", type=Path, default=Path("/"), help="where proc and sys are (default: %(default)s)")
    one.add_argument("--dry-run", action="store_true", help="say which points would be measured, and set nothing")
    _format(one)

    _doctor(verb("doctor", verbs.doctor, "find what is wrong on this board, coordinator or machine, and what mends it"))

    _clocks(verb("clocks", verbs.clocks, "hold a board's clocks at an operating point, and give them back"))

    one = verb("bench", verbs.bench, "measure fedquilt on this machine")
    one.add_argument(
        "what",
        choices=("idle", "blobs", "sensors", "energy", "stitch", "memory", "footprint", "deadlines", "fedsq", "sim"),
    )
    one.add_argument("--size", type=_positive, nargs="+", help="of stitch, memory: images of so many pixels")
    one.add_argument(
        "--data", type=Path, metavar="FOLDER", help="of sim: IDX images of 28x28, such as MNIST's raw folder"
    )
    one.add_argument(
        "--with", dest="beside", nargs="+", metavar="NAME", help="of sim: flower, pfl; installed into a cache folder"
    )
    group = one.add_argument_group("ablations", "of stitch: whole searches with and without parts of the method")
    group.add_argument(
        "--ablate", type=Path, nargs="?", const=Path(), metavar="JOB", help="a prepared job (default: the demo's)"
    )
    group.add_argument("--bundle", type=Path, help="default: JOB.bundle beside the job file")
    group.add_argument("--alpha", nargs="+", help="Dirichlet partitions, or iid (default: the job's own partition)")
    group.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2")
    group.add_argument(
        "--only", nargs="+", metavar="NAME", help="some searches and comparisons; an unknown one lists all"
    )
    group.add_argument("--out", type=Path, help="folder for finished runs and the plot (default: fedquilt-ablation)")
    _format(one)
    return top


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _above_0(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: up to 64 of a-z, 0-9, '.', '_' and '-', beginning with one of a-z, 0-9"
        )
    return text


def _clocks(verb: argparse.ArgumentParser) -> None:
    whats = verb.add_subparsers(dest="what", metavar="WHAT", required=True)
    serve = whats.add_parser("serve", help="be the helper that sets clocks for an agent: needs root")
    serve.add_argument("--group", help="group that may speak to it (default: root alone)")
    serve.add_argument(
        "--state",
        type=Path,
        default=Path("/var/lib/fedquilt-clocks"),
        help="folder of its journal, from which a killed helper restores (default: %(default)s)",
    )
    serve.add_argument(
        "--watchdog", type=_seconds, default=10.0, metavar="S", help="let go of a client silent for so long (10)"
    )
    serve.add_argument("--hottest", type=float, default=85.0, metavar="C", help="hold nothing above it (85)")
    status = whats.add_parser("status", help="what can be set here, how it is set and who holds it")
    _format(status)
    hold = whats.add_parser("hold", help="hold a point until interrupted, through the helper")
    hold.add_argument("point", help="a mode of the board, or cpu=1.2GHz,gpu=850MHz,emc=1600MHz, or MODE,gpu=...")
    hold.add_argument("--seconds", type=_seconds, metavar="N", help="let go after so long")
    for one in (serve, hold):
        one.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")
    for one in (serve, status, hold):
        one.add_argument(
            "--socket", type=Path, default=Path("/run/fedquilt/clocks.sock"), help="the helper's (default: %(default)s)"
        )
        one.add_argument("--root", type=Path, default=Path("/"), help="where sys is (default: %(default)s)")


def _doctor(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("settings", type=Path, nargs="?", help="a board's agent.toml: its agent, broker and machine")
    verb.add_argument("--home", type=Path, help="a coordinator's folder")
    verb.add_argument("--root", type=Path, default=Path("/"), help="where etc, proc and sys are (default: %(default)s)")
    _broker(verb, default=None)
    _format(verb)


def _flash(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("settings", type=Path, nargs="?", help="the board's agent.toml, with the files that it names")
    verb.add_argument("--target", help="jetpack6, jetpack7, raspberry-pi-os, arm64 or amd64")
    verb.add_argument("--device", type=_name, help="another name than agent.toml's, which then does for many boards")
    where = verb.add_mutually_exclusive_group()
    where.add_argument("--rootfs", type=Path, metavar="DIR", help="a mounted root, or L4T's rootfs before flashing")
    where.add_argument("--ssh", metavar="USER@HOST", help="a running board")
    where.add_argument("--tar", type=Path, metavar="FILE", help="an archive (default: fedquilt-DEVICE.tar)")
    verb.add_argument(
        "--ssh-option", action="append", default=[], metavar="OPTION", help="for ssh, as --ssh-option=-p22"
    )
    verb.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing there")
    verb.add_argument("--token", type=Path, metavar="FILE", help="one-time token, for a board that enrols")
    verb.add_argument(
        "--extras", nargs="*", default=["onnx"], metavar="EXTRA", help="what the board can run (default: onnx)"
    )
    verb.add_argument("--python", metavar="3.N", help="of the board (default: the target's)")
    verb.add_argument("--interpreter", metavar="PATH", help="on the board (default: /usr/bin/python3.N)")
    verb.add_argument(
        "--system-packages", action="store_true", help="let the agent see the board's own packages too: NVIDIA's torch"
    )
    verb.add_argument("--wheels", type=Path, metavar="DIR", help="where downloads are kept (default: in ~/.cache)")
    verb.add_argument("--index", metavar="URL", help="one more package index")
    verb.add_argument("--constraint", type=Path, metavar="FILE", help="pip's: versions that are allowed (numpy==2.2.6)")
    verb.add_argument("--refresh", action="store_true", help="look for newer packages than were downloaded before")
    verb.add_argument("--uninstall", action="store_true", help="take it out again, from --rootfs or --ssh")
    verb.add_argument("--purge", action="store_true", help="with --uninstall: settings, identity and state as well")


def _broker_config(whats: Any) -> None:
    one = whats.add_parser("config", help="write the configuration of a broker of your own: TLS, rights, limits")
    one.add_argument("--for", dest="kind", choices=("mosquitto", "emqx"), required=True)
    one.add_argument("--host", dest="hosts", action="append", required=True, help="name or address that clients call")
    one.add_argument("--out", type=Path, required=True, help="folder for all that the broker needs")
    one.add_argument("--installed", metavar="DIR", help="where that folder will be (default: in /etc of the broker)")
    one.add_argument("--listen", type=_positive, default=8883, metavar="PORT", help="its TLS port (default: 8883)")
    one.add_argument("--fleet", type=_name, default="fleet", help="the fleet's name in topics (default: %(default)s)")
    _authority(one)


def _ca(verb: argparse.ArgumentParser) -> None:
    whats = verb.add_subparsers(dest="what", metavar="WHAT", required=True)
    one = whats.add_parser("init", help="make an authority: a key, a certificate, a revocation list")
    one.add_argument("--name", default="fedquilt", help="of the authority, in its certificate (default: %(default)s)")
    one.add_argument("--crl-url", metavar="URL", help="where brokers will fetch the revocation list (EMQX does)")
    _authority(one)
    one = whats.add_parser("issue", help="a certificate and key for the coordinator, or with --host for a server")
    one.add_argument("name", type=_name)
    one.add_argument("--host", dest="hosts", action="append", default=[], help="name or address of a server")
    one.add_argument("--out", type=Path, default=Path(), help="folder (default: this one)")
    one.add_argument("--days", type=_above_0, metavar="N", help="how long it is valid (default: 730)")
    _authority(one)
    one = whats.add_parser("list", help="every certificate, and the tokens not yet used")
    _authority(one)
    _format(one)
    one = whats.add_parser("revoke", help="revoke what a device (or server) has, and write the revocation list")
    one.add_argument("device", type=_name)
    _authority(one)


def _enrol(verb: argparse.ArgumentParser) -> None:
    whats = verb.add_subparsers(dest="what", metavar="WHAT", required=True)
    one = whats.add_parser("token", help="a one-time token for a board; printed once")
    one.add_argument("device", help="the board's id, or a pattern such as 'orin-*'")
    one.add_argument("--hours", type=_above_0, default=72.0, metavar="N", help="it ends after (default: %(default)g)")
    one.add_argument("--out", type=Path, metavar="FILE", help="write it there, mode 0600, and do not show it")
    _authority(one)
    one = whats.add_parser("serve", help="answer boards that enrol or renew, over HTTPS")
    one.add_argument("--listen", default="0.0.0.0", metavar="ADDRESS", help="default: %(default)s")  # noqa: S104
    one.add_argument("--port", type=int, default=8884)
    one.add_argument(
        "--host", dest="hosts", action="append", default=[], help="name or address that boards call (default: ours)"
    )
    one.add_argument("--days", type=_above_0, metavar="N", help="how long certificates are valid (default: 365)")
    _authority(one)
    one = whats.add_parser("sign", help="sign a request that was carried here from a board")
    one.add_argument("csr", type=Path)
    one.add_argument("--device", type=_name, required=True, help="the board that you took it from")
    one.add_argument("--out", type=Path, metavar="FILE", help="default: CSR with .crt")
    one.add_argument("--days", type=_above_0, metavar="N", help="how long it is valid (default: 365)")
    _authority(one)
    one = whats.add_parser("board", help="on the board: get a certificate, or renew it when it is due")
    one.add_argument("settings", type=Path, help="its agent.toml")
    one.add_argument("--url", help="the endpoint (default: url under [enrol])")
    one.add_argument("--wait", action="store_true", help="try until the endpoint answers")
    how = one.add_mutually_exclusive_group()
    how.add_argument("--request", type=Path, metavar="FILE", help="write a request to be carried to the authority")
    how.add_argument("--accept", type=Path, metavar="FILE", help="keep the certificate that was carried back")


def _authority(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--ca", type=Path, default=Path("fedquilt-ca"), help="the authority's folder (%(default)s)")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is no time in seconds")
    return value


def _home(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--home", type=Path, default=Path("fedquilt-runs"), help="the coordinator's folder (default: %(default)s)"
    )


def _format(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--format", choices=("text", "json"), default="text")


def _broker(verb: argparse.ArgumentParser, default: str | None = "mqtt://127.0.0.1:1883") -> None:
    group = verb.add_argument_group("broker")
    group.add_argument(
        "--broker",
        default=default,
        metavar="URL",
        help="mqtt[s]://[user@]host[:port]" + (" (default: %(default)s)" if default else ""),
    )
    group.add_argument("--ca", type=Path, help="certificate authority of the broker, PEM")
    group.add_argument("--cert", type=Path, help="this side's certificate, PEM")
    group.add_argument("--key", type=Path, help="this side's private key, PEM")
    group.add_argument("--password-file", type=Path, help="file with the user's password on its first line")
    group.add_argument("--fleet", type=_name, default="fleet", help="the fleet's name in topics (default: %(default)s)")
