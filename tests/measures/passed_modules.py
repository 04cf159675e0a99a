"""Modules of ours that one task and one update pass in a job with one device, and that run at all.

    python -m tests.measures.passed_modules

The coordinator, the agent and the engine run in one process on virtual time. The second round is measured, in which
nothing is made for the first time. A path has the modules in order of their first call, with what the process does
meanwhile for others: it polls, draws the progress and looks for garbage. Only calls in the main thread count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
JOB: Final = """
name = "job"
method = "fedavg"
rounds = 2
engine = "numpy"
check = {{ every = 0 }}
model = {{ name = "mlp", inputs = 64, hidden = [32], classes = 10 }}
data = {{ path = "{root}/tools/lab/demo/digits.npz", partition = "dirichlet", alpha = 0.5 }}
fleet = {{ devices = 1, boards = ["jetson-nano"], budgets = ["256MB"] }}
"""


Call = tuple[str, str]  # module and function
SEGMENTS: Final[dict[str, tuple[Call, Call]]] = {
    "one task passes, from the coordinator to the worker's start": (
        ("coordinator/jobs/controller.py", "send_task"),
        ("edge_agent/task/worker.py", "start"),
    ),
    "one update passes, from the worker's end to the commit": (
        ("edge_agent/task_runner.py", "_record_task_result"),
        ("coordinator/jobs/job.py", "start_next_round"),
    ),
    "one update passes, from its announcement to its acceptance": (
        ("edge_agent/agent.py", "submit_update"),
        ("coordinator/rounds/job_state.py", "acceptance_event"),
    ),
}
RUN: Final = "run in the whole job"
REPORT: Final = ("cli/jobs.py", "_write_report")


def record_calls(job: Path) -> list[Call]:
    import fedquilt.extras  # noqa: F401  (as every command does, but not its help)
    from fedquilt.cli import entry  # modules that are imported from here on are recorded

    codes = []
    sys.setprofile(lambda frame, event, _: codes.append(frame.f_code) if event == "call" else None)
    try:
        status = entry.main(["simulate", str(job), "--link", "memory", "--home", str(job.parent / "home")])
    finally:
        sys.setprofile(None)
    if status:
        raise SystemExit(status)
    files = {code.co_filename: Path(code.co_filename) for code in codes}
    modules = {
        name: path.relative_to(ROOT).as_posix().removeprefix("fedquilt/")
        for name, path in files.items()
        if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / ".venv") and path != Path(__file__)
    }
    return [(modules[code.co_filename], code.co_name) for code in codes if code.co_filename in modules]


def trace_job() -> list[Call]:
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text(JOB.format(root=ROOT), encoding="utf-8")
        for words in (("fedquilt.cli", "prepare", str(job)), ("tests.measures.passed_modules", str(job))):
            subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return [tuple(each) for each in json.loads(job.with_name("calls.json").read_text(encoding="utf-8"))]


def select_path(calls: list[Call], first: Call, last: Call) -> list[str]:
    starts = [index for index, call in enumerate(calls) if call == first]
    ends = [index for index, call in enumerate(calls) if call == last and starts[1:2] < [index]]
    if len(starts) != 2 or not ends:
        raise LookupError(f"a round does not call {first} once and then {last}: correct SEGMENTS in {__file__}")
    return list(dict.fromkeys(module for module, _ in calls[starts[1] : ends[0] + 1]))


def find_paths() -> dict[str, list[str]]:
    calls = trace_job()
    calls = calls[: calls.index(REPORT)]  # the report of a job is no part of the job
    paths = {name: select_path(calls, *segment) for name, segment in SEGMENTS.items()}
    return {**paths, RUN: sorted({module for module, _ in calls})}


def main() -> None:
    if jobs := sys.argv[1:]:
        calls = record_calls(Path(jobs[0]))
        Path(jobs[0]).with_name("calls.json").write_text(json.dumps(calls), encoding="utf-8")
        return
    paths = find_paths()
    for name, modules in paths.items():
        print(f"\n{name}:\n  " + "\n  ".join(modules))
    print()
    for name, modules in paths.items():
        inside = sum(module.startswith("coordinator/") for module in modules)
        print(f"{len(modules):4} modules {name} ({inside} of coordinator/)")


if __name__ == "__main__":
    main()
