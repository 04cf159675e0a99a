"""How command lines are read: verbs from files, words and options, near words, help, and what is imported for it."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from waiting import wait_until

from command_lines import parsed
from fedquilt.cli import commands, main, options
from fedquilt.console import progress
from fedquilt.coordinator import settings
from fedquilt.coordinator.fleet.device_status import DeviceStatus, TelemetryStore
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_verb_of_another_spelling_is_answered_with_the_nearest(capsys):
    assert "no verb 'bord'; did you mean 'board'?" in said(capsys, "bord")
    assert "no verb 'isue'; did you mean 'issue'?" in said(capsys, "identity", "isue")
    assert "no such option: --hom; did you mean '--home'? (`fedquilt ls --help`)" in said(capsys, "ls", "--hom", "x")
    assert "did you mean 'memory'?" in said(capsys, "simulate", "job.toml", "--link", "memry")


def test_an_option_of_many_words_takes_all_up_to_the_next():
    given = parsed(["compare", "job.toml", "--methods", "fedavg", "fedprox", "--seeds", "0", "-1", "--target", "0.8"])
    assert (given["methods"], given["seeds"], given["target"]) == (("fedavg", "fedprox"), (0, -1), 0.8)
    assert parsed(["compare", "job.toml"])["seeds"] == (0, 1, 2)
    assert parsed(["compare", "job.toml", "--seeds", "3", "--seeds=4"])["seeds"] == (3, 4)
    assert parsed(["board", "flash", "agent.toml", "--extras"])["extras"] == ("",)
    assert parsed(["board", "flash", "agent.toml"])["extras"] == ("onnx",)
    with pytest.raises(click.UsageError, match="requires an argument"):
        parsed(["compare", "job.toml", "--methods"])


def test_words_of_one_option_may_be_separated_by_commas():
    """With or without spaces; not where a word itself may hold a comma: a value of --set."""
    assert parsed(["compare", "job.toml", "--seeds", "0,1"])["seeds"] == (0, 1)
    assert parsed(["compare", "job.toml", "--seeds=0,1,-2"])["seeds"] == (0, 1, -2)
    assert parsed(["compare", "job.toml", "--seeds", "0,", "1", "--target", "0.8"])["seeds"] == (0, 1)
    assert parsed(["compare", "job.toml", "--methods", "fedavg,fedprox"])["methods"] == ("fedavg", "fedprox")
    assert parsed(["compare", "job.toml", "--set", "a.b=[1,2]"])["changes"] == ("a.b=[1,2]",)
    with pytest.raises(click.UsageError, match="'x' is not a whole number"):
        parsed(["compare", "job.toml", "--seeds", "0,x"])


def test_options_that_exclude_each_other_are_refused_together(capsys):
    assert "--rootfs is not possible with --ssh" in said(
        capsys, "board", "flash", "a.toml", "--rootfs", "r", "--ssh", "me@orin"
    )


def test_a_verb_of_a_family_is_asked_for(capsys):
    for words in ((), ("identity",)):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        assert "Usage: fedquilt" in capsys.readouterr().err


def test_more_is_logged_with_v_before_a_verb_or_after_it():
    show = "import logging; logging.lastResort = None; from fedquilt.cli import commands, main; "
    code = show + "main([*{words!r}, 'ls', '--home', '/none', *{more!r}]); print(logging.getLogger().level)"
    for words, more, level in (((), ("-v",), 20), (("-v",), ("-v",), 10)):
        done = subprocess.run(
            [sys.executable, "-c", code.format(words=words, more=more)], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{level}\n", (words, more)


def test_help_fits_80_columns(capsys):
    context = click.Context(commands.root_command, info_name="fedquilt")
    lines = [["--help"]]
    for name in commands.root_command.list_commands(context):
        found = commands.root_command.get_command(context, name)
        lines += [[name, "--help"]]
        lines += [[name, inner, "--help"] for inner in getattr(found, "commands", ())]
    for words in lines:
        with pytest.raises(SystemExit):
            main(words)
        shown = capsys.readouterr().out.splitlines()
        assert max(map(len, shown)) <= 80, (words, max(shown, key=len))


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        (["--help"], {"numpy", "torch", "sqlite3", "asyncio", "msgspec", "fedquilt.core", "fedquilt.cli.agent"}),
        (["-v", "agent", "/none.toml"], {"numpy", "torch", "onnxruntime", "click", "email", "http", "lzma"}),
        (["ls"], {"numpy", "torch", "onnxruntime", "email"}),
        (["devices"], {"numpy", "torch", "onnxruntime", "email"}),
    ],
)
def test_what_is_light_stays_light(words, forbidden, tmp_path):
    with Store(tmp_path / options.HOME) as store:
        store.add_job(settings.JobSettings("small", "fedavg", rounds=1), Path("b.bundle"))
    code = f"""
import sys
from fedquilt.cli import main
try:
    main({words!r})
except SystemExit:
    pass
print(*sys.modules, file=sys.stderr)"""
    environ = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert not forbidden & set(done.stderr.splitlines()[-1].split())


def test_an_idle_agent_has_imported_nothing_of_a_release_a_task_or_prometheus():
    code = """
import sys
from fedquilt.cli import entry, agent
from fedquilt.edge_agent import daemon, messages, settings
known = messages.capabilities_from_settings(settings.parse_settings({"device": "d", "home": "h"}), 1 << 30)
assert messages._package_versions(known.engines)["numpy"]
print(*sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {
        *("numpy", "torch", "onnxruntime", "prometheus_client", "statistics", "tarfile", "zipfile"),
        *("importlib.metadata", "fedquilt.edge_agent.upgrade.archive", "fedquilt.edge_agent.upgrade.environment_build"),
        *("fedquilt.host.http_server", "fedquilt.onnx.graph_check", "fedquilt.metrics_endpoint"),
    }


@pytest.mark.parametrize("module", ["click", "fedquilt.cli.lab"])
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(module, tmp_path):
    code = f"""
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from fedquilt.cli import main
sys.exit(main(["demo"]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def completed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    words = line.split(" ")
    monkeypatch.setenv("_FEDQUILT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert main([]) == 0
    return [each.partition(",")[2] for each in capsys.readouterr().out.split()]


def test_a_shell_completes_verbs_options_methods_and_runs(tmp_path, monkeypatch, capsys):
    """And says nothing where a home cannot be read."""
    from fedquilt.coordinator import settings
    from fedquilt.coordinator.storage.store import Store

    def ask(line):
        return completed(line, monkeypatch, capsys)

    assert ask("fedquilt lab par") == ["partition"]
    assert ask("fedquilt identity is") == ["issue"]
    assert ask("fedquilt simulate --dev") == ["--devices"]
    assert ask("fedquilt simulate --link mem") == ["memory"]
    assert ask("fedquilt methods fedprox") == ["fedprox"]
    assert ask("fedquilt compare job.toml --methods scaf") == ["scaffold"]
    assert ask("fedquilt board flash agent.toml --target rasp") == ["raspberry-pi-os"]
    assert ask("fedquilt lab reproduce budg") == ["budgets"]
    Store(tmp_path / "fleet").close()
    with TelemetryStore(tmp_path / "fleet", writes=True) as readings:
        readings.write_telemetry([DeviceStatus("orin-07"), DeviceStatus("pi-01")], [])
    assert ask(f"fedquilt devices --home {tmp_path / 'fleet'} or") == ["orin-07"]
    assert ask(f"fedquilt devices --home {tmp_path / 'none'} d") == []
    with Store(tmp_path / "runs") as store:
        run = store.add_job(settings.parse_job({"name": "digits", "method": "fedavg"}), tmp_path)
    assert ask(f"fedquilt logs --home {tmp_path / 'runs'} dig") == [run]
    assert ask(f"fedquilt logs --home {tmp_path / 'none'} dig") == []
    (tmp_path / "runs" / "fedquilt.db").write_bytes(b"no database")
    assert ask(f"fedquilt prune --home {tmp_path / 'runs'} dig") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell, monkeypatch, capsys):
    monkeypatch.setenv("_FEDQUILT_COMPLETE", f"{shell}_source")
    assert main([]) == 0
    assert "_FEDQUILT_COMPLETE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "function", "words"),
    [
        ("coordinator.storage.backup", "write_backup", ("backup", "save", "runs", "runs.tar")),
        ("tools.report.partition", "print_counts", ("lab", "partition", "job.toml")),
    ],
)
def test_what_may_take_long_says_that_it_goes_on(tmp_path, monkeypatch, capsys, module, function, words):
    monkeypatch.chdir(tmp_path)
    Store(tmp_path / "runs").close()
    Path("job.toml").write_text("name = 'job'\nmethod = 'fedavg'\n")
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)

    def work(*args):
        wait_until(lambda: "so far" in capsys.readouterr().err, "a line")
        raise JobError("that is enough")

    monkeypatch.setattr(f"fedquilt.{module}.{function}", work)
    assert main(words) == 2
    assert "that is enough" in capsys.readouterr().err


def test_a_deleted_folder_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
