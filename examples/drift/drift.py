"""From drift to a new model, with three simulated boards. Every step is a `fedquilt` command.

Run it in a folder with a copy of tools/lab/demo/job.toml, digits.npz and bundle/ with the extra `onnx`:

1. Boards stitch a network for digits. `rollout model` sends it to all boards, and `model serve` classifies with it.
2. The inputs get darker and noisier. The runner reports drift, and `fedquilt devices` shows it.
3. Boards get labels of the changed inputs and stitch another network. `rollout model` replaces the first network.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

BOARDS = ("jetson-nano", "jetson-tx2", "raspberry-pi-5")
FEDQUILT = (sys.executable, "-m", "fedquilt.cli")
TIMEOUT_S = 120.0


def run(*arguments: str) -> None:
    print("\n$ fedquilt", *arguments, flush=True)
    subprocess.run([*FEDQUILT, *arguments], check=True, stdin=subprocess.DEVNULL)


def start(stack: contextlib.ExitStack, *arguments: str) -> None:
    with Path("processes.log").open("ab") as log:
        process = subprocess.Popen([*FEDQUILT, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)


def wait_until(condition: Callable[[], bool], description: str) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            sys.exit(f"{description}: not within {TIMEOUT_S:g} s, see processes.log")
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accepts_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def write_settings(board: str, index: int, broker: str) -> None:
    Path(board).mkdir()
    Path(board, "agent.toml").write_text(
        f'device = "{board}"\nboard = "{board}"\nhome = "."\nbudget = "256MB"\ntelemetry_s = 2.0\n'
        f'[broker]\nurl = "{broker}"\n'
        f'[data]\npath = "../seen.npz"\npartition = "iid"\nshare = {index}\nshares = {len(BOARDS)}\n'
    )


def darken(x: np.ndarray, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 10, x.shape)
    return np.clip(0.5 * x + noise, 0, 255).astype(np.uint8)


def store_examples(digits: dict[str, np.ndarray]) -> None:
    with open("seen.npz.part", "wb") as file:
        np.savez(file, **digits)  # type: ignore[arg-type]
    os.replace("seen.npz.part", "seen.npz")  # atomic, because boards may read the file at any time


def serve(x: np.ndarray, y: np.ndarray, port: int, count: int) -> float:
    """Let the runner classify `count` random images. Return the share of correct answers."""
    correct, connection = 0, http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    draws = np.random.default_rng(0)
    for _ in range(count // 20):
        rows, file = draws.integers(len(y), size=20), io.BytesIO()
        np.savez(file, x=x[rows], y=y[rows])
        connection.request("POST", "/v1/predict", file.getvalue())
        answers = json.loads(connection.getresponse().read())["answers"]
        correct += sum(
            answer["prediction"] == str(label) for answer, label in zip(answers, y[rows].tolist(), strict=True)
        )
    return correct / (count // 20 * 20)


def rollouts_are_done() -> bool:
    command = (*FEDQUILT, "rollout", "status", "--home", "runs", "--format", "json")
    return all(rollout["status"] == "done" for rollout in json.loads(subprocess.check_output(command)))


def describe_device(board: str) -> str:
    return subprocess.check_output((*FEDQUILT, "devices", board, "--home", "runs"), text=True)


def read_served(board: str) -> dict[str, float]:
    path = Path(board, "models", "served.json")
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    with np.load("digits.npz") as file:
        digits = dict(file)
    store_examples(digits)
    job = (
        Path("job.toml").read_text().replace("expansions = 16", "expansions = 0").replace("devices = 6", "devices = 3")
    )
    Path("digits.toml").write_text(job.replace("deadline_s = 60", "deadline_s = 60\nstart_devices = 3"))
    Path("digits.bundle").symlink_to("bundle")
    broker_port, port = free_port(), free_port()
    broker, first_board = f"mqtt://127.0.0.1:{broker_port}", BOARDS[0]
    with contextlib.ExitStack() as stack:
        start(stack, "broker", "--listen", f"127.0.0.1:{broker_port}")
        start(stack, "serve", "--home", "runs", "--broker", broker)
        for index, board in enumerate(BOARDS):
            write_settings(board, index, broker)
            start(stack, "agent", f"{board}/agent.toml")
        wait_until(Path("runs/fedquilt.db").exists, "the coordinator starts")
        rollout = ("--home", "runs", "--phases", "12%", "100%", "--soak", "1s")
        run("run", "digits.toml", "--home", "runs")
        run("rollout", "model", "digits", *rollout)
        wait_until(Path(first_board, "models", "current").exists, "the model is in use")
        start(stack, "model", "serve", f"{first_board}/models", "--listen", f"127.0.0.1:{port}")
        wait_until(lambda: accepts_connections(port), "the runner starts")
        x, y, dark = digits["x_test"], digits["y_test"], darken(digits["x_test"], 1)
        print(f"\nright answers: {serve(x, y, port, 1000):.1%}")
        print(f"right answers in the dark: {serve(dark, y, port, 1000):.1%}")
        wait_until(lambda: (read_served(first_board).get("drift") or 0.0) > 0.3, "the runner reports drift")
        wait_until(
            lambda: re.search(r"drift (0\.[3-9]|1)", describe_device(first_board)) is not None,
            "the agent reports drift",
        )
        run("devices", first_board, "--home", "runs")
        store_examples({**digits, "x_train": darken(digits["x_train"], 0), "x_test": dark})
        old_model = Path(first_board, "models", "current").resolve()
        run("run", "digits.toml", "--home", "runs")
        run("rollout", "model", "digits", *rollout, "--min-gain", "5pt")
        wait_until(lambda: Path(first_board, "models", "current").resolve() != old_model, "the new model is in use")
        wait_until(rollouts_are_done, "every board keeps the new model")
        print(f"\nright answers in the dark, with the new model: {serve(dark, y, port, 1000):.1%}")
        run("rollout", "status", "--home", "runs")


if __name__ == "__main__":
    main()
