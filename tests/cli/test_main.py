"""The entry point: help without torch, unknown commands, exit codes in one place."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantlab.errors import MissingAsset, RunError, UsageError
from quantlab_cli import main as entry
from quantlab_cli.main import COMMANDS, cli, main

ROOT = Path(__file__).parents[2]
HELP = """
import sys, time
start = time.process_time()  # not the clock: the tests may share their cores
from quantlab_cli.main import main
code = main(sys.argv[1:])
print(time.process_time() - start, code, sorted({"torch", "transformers", "triton", "numpy",
      "pyarrow", "altair"} & set(sys.modules)))
"""


def helped(*arguments):
    run = subprocess.run(
        [sys.executable, "-c", HELP, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")])},
    )
    *text, last = run.stdout.splitlines()
    seconds, code, loaded = last.split(maxsplit=2)
    return "\n".join(text), float(seconds), int(code), loaded


def test_help_is_fast_and_imports_no_torch():
    runs = [helped("--help") for _ in range(3)]
    text, _, code, loaded = runs[0]
    assert code == 0 and loaded == "[]"
    assert all(f"  {name} " in text for name in COMMANDS)
    assert min(seconds for _, seconds, _, _ in runs) < 0.3


@pytest.mark.parametrize("name", COMMANDS)
def test_h_of_every_command_imports_no_torch(name):
    text, _, code, loaded = helped(name, "-h")
    assert code == 0 and "Usage: quantlab " + name in text
    assert "torch" not in loaded and "transformers" not in loaded


def test_listed_help_is_the_commands_own(capsys):
    for name in COMMANDS:
        command = cli.get_command(None, name)
        assert command is not None and command.name == name and command.help


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("quantlab, version 0.")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["kll"], "no such command 'kll'. Did you mean 'kl'?"),
        (["kl"], "Missing option '--model'"),
        (["kl", "-M", "tiny-gdn", "--tokns", "3"], "Did you mean"),
        (["ls", "formts"], "Did you mean 'formats'?"),
    ],
)
def test_usage_errors_are_2(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, said",
    [
        (UsageError("a"), 2, "quantlab: a"),
        (RunError("b"), 1, "quantlab: b"),
        (MissingAsset("c"), 5, "quantlab: c"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("d"), 1, "this is a bug"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_exit_codes(error, code, said, monkeypatch, capfd):
    def raising(**kwargs):
        raise error

    monkeypatch.setattr(entry.cli, "main", raising)
    if isinstance(error, BrokenPipeError):
        monkeypatch.setattr(os, "dup2", lambda a, b: None)
    assert main([]) == code
    err = capfd.readouterr().err
    assert said in err
    assert ("Traceback" in err) == isinstance(error, ZeroDivisionError)


SLEEPER = """
import sys, time
from quantlab_cli import main as entry
def sleep(**kwargs):
    print("ready", flush=True)
    time.sleep(60)
entry.cli.main = sleep
sys.exit(entry.main([]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_with_130(number):
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")])},
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    begun = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=20) == 130 and time.monotonic() - begun < 10
