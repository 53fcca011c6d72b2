"""`quantlab kl`: options to spec, every wrong value, and runs with a stand-in engine."""

import json
from pathlib import Path

import pytest

import quantlab
import quantlab.study.build as build
import quantlab.study.run as run_module
from quantlab.errors import RunError
from quantlab.models.source import Source
from quantlab.study.result import load_result
from quantlab.study.spec import KlSpec
from quantlab_cli.kl import kl as kl_command
from quantlab_cli.main import main
from quantlab_cli.progress import Reporter, duration
from tests.study.fake import FakeBackend


@pytest.fixture(autouse=True)
def zoo_is_installed(monkeypatch, tmp_path):
    real = build.resolve

    def resolve(name):
        if name == "tiny-gdn":
            return Source(name=name, origin="zoo", path=Path("zoo"))
        return real(name)

    monkeypatch.setattr(build, "resolve", resolve)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def backend(monkeypatch):
    stand_in = FakeBackend()
    monkeypatch.setattr(run_module, "Backend", lambda: stand_in)
    return stand_in


def spec_of(monkeypatch, *arguments):
    """The spec that a command line comes to."""
    caught = []

    def stop(spec, *args, **kwargs):
        caught.append(spec)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_kl", stop)
    assert main(["kl", "-M", "tiny-gdn", "--device", "cpu", *arguments]) == 130
    return caught[0]


def names(spec):
    return [p.short for p in spec.policies]


def test_defaults_are_the_papers(monkeypatch):
    spec = spec_of(monkeypatch)
    assert (spec.tokens, spec.prompt, spec.data, spec.engine) == (4096, 512, "books", "windowed")
    assert names(spec) == [
        "shared fp32",
        "shared fp16-sr",
        "shared fp8-sr",
        "shared nvfp4-sr",
        "fp8 / fp32",
        "nvfp4 / fp32",
        "fp8 / fp16-sr",
        "nvfp4 / fp16-sr",
        "nvfp4 / fp8-sr",
    ]


def test_policies_of_all_options_each_once_and_the_floor_first(monkeypatch):
    spec = spec_of(
        monkeypatch,
        *("--shared", "nvfp4-sr", "--policy", "nvfp4 / fp16-sr", "--policy", "shared:nvfp4-sr"),
        *("--read", "fp8", "--recur", "fp32", "--policy", "conventional:fp8-sr"),
    )
    assert names(spec) == [
        "shared fp32",
        "nvfp4 / fp16-sr",
        "shared nvfp4-sr",
        "conventional fp8-sr",
        "fp8 / fp32",
    ]
    assert names(spec_of(monkeypatch, "--shared", "fp8", "--no-floor")) == ["shared fp8"]


def test_window_records_and_corrections_reach_every_policy(monkeypatch):
    spec = spec_of(
        monkeypatch,
        *("--shared", "fp8", "--policy", "nvfp4/fp32 L=4", "--window", "32"),
        *("--records", "fp32", "--corrections", "fold"),
    )
    assert [p.window for p in spec.policies] == [32, 4, 32]
    assert {p.records for p in spec.policies[1:]} == {"fp32"}
    assert {p.corrections for p in spec.policies[1:]} == {"fold"}


def test_other_options(monkeypatch):
    spec = spec_of(
        monkeypatch,
        *("-N", "8K", "--streams", "2", "--prompt", "509", "--seed", str(2**64 - 1)),
        *("--engine", "stepwise", "--dtype", "bf16", "--batch-rows", "30", "--segment", "128"),
    )
    assert (spec.tokens, spec.streams, spec.prompt, spec.seed) == (8192, 2, 509, 2**64 - 1)
    assert (spec.engine, spec.dtype, spec.batch_rows, spec.segment) == ("stepwise", "bf16", 30, 128)


def test_options_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("QUANTLAB_KL_TOKENS", "64")
    assert spec_of(monkeypatch).tokens == 64


WRONG = [
    (["--shared", "nvfp5"], "--shared: ", "Did you mean 'nvfp4'"),
    (["--policy", "shred:fp8"], "--policy: unknown policy", "Did you mean 'shared'"),
    (["--policy", "fp8"], "--policy: ", "shared:fp8"),
    (["--suite", "replaysm"], "--suite: unknown suite", "Did you mean 'replayssm'"),
    (["--read", "fp8"], "--read is one copy of two", "--recur fp32"),
    (["--recur", "fp8"], "--recur is one copy of two", "--read fp32"),
    (["--read", "fp8", "--recur", "fp23"], "--read/--recur: ", "Did you mean 'fp32'"),
    (["--read", "fp8", "--recur", "fp32", "-L", "1"], "--read/--recur: ", "never be read"),
    (["-N", "0"], "'--tokens'", "must be positive (got 0)"),
    (["-N", "-16"], "'--tokens'", "must be positive (got -16)"),
    (["-N", "many"], "'--tokens'", "not a whole number"),
    (["--streams", "0"], "'--streams'", "must be positive"),
    (["--prompt", "-1"], "'--prompt'", "must be positive"),
    (["--window", "0"], "'--window'", "must be positive"),
    (["--batch-rows", "0"], "'--batch-rows'", "must be positive"),
    (["--segment", "-64"], "'--segment'", "must be positive"),
    (["--seed", "-1"], "'--seed'", "range"),
    (["--engine", "windows"], "'windowed', 'stepwise'", "Did you mean 'windowed'"),
    (["--dtype", "fp8"], "'fp32', 'bf16', 'fp16'", "Did you mean 'fp"),
    (["--records", "fp34"], "'--records'", "Did you mean 'fp32'"),
    (["--corrections", "folded"], "'--corrections'", "Did you mean 'fold'"),
    (["--device", "gpu"], "unknown device 'gpu'", "cuda:<index>"),
    (["--batch-rows", "9"], "--batch-rows must hold a stream", "10 rows (got 9)"),
    (["--segment", "100"], "--segment must be a multiple of 64", "nearest 128"),
    (["--data", "bocks"], "--data 'bocks'", "did you mean 'books'"),
    (["--data", "nowhere.txt"], "no such data set or file", "books, pg19"),
    (["-N", "150K"], "--tokens 153,600", "longest N possible with 1 stream of books is 149,537"),
    (["--streams", "5"], "--streams 5", "books has 4 documents"),
]


@pytest.mark.parametrize("arguments, option, says", WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_wrong_values_are_explained_before_anything_starts(
    arguments, option, says, backend, capsys
):
    assert main(["kl", "-M", "tiny-gdn", "--device", "cpu", *arguments]) == 2
    err = capsys.readouterr().err
    assert option in err and says in err and "Traceback" not in err
    assert backend.loads == 0 and not Path("runs").exists()


def test_unknown_model(capsys):
    assert main(["kl", "-M", "tiny-gnd"]) == 2
    err = capsys.readouterr().err
    assert "unknown model 'tiny-gnd': did you mean tiny-gdn?" in err and "qwen3.5-4b" in err
    assert main(["kl", "-M", "./nowhere"]) == 2


ARGUMENTS = ["kl", "-M", "tiny-gdn", "--device", "cpu", "-N", "64", "--streams", "2"]
TWO = ["--shared", "nvfp4-sr"]


def test_end_to_end(backend, capsys):
    assert main([*ARGUMENTS, *TWO, "-o", "out", "--json"]) == 0
    captured = capsys.readouterr()
    out = Path("out")
    assert {p.name for p in out.iterdir()} == {
        *("rows.parquet", "spec.json", "run.json", "summary.csv", "index.html"),
        *("kl.png", "kl.svg", "tail.png", "tail.svg"),
    }
    lines = captured.out.splitlines()
    assert "shared nvfp4-sr" in captured.out and lines[0].split()[:3] == ["policy", "16", "64"]
    document = json.loads(lines[-1])
    assert document["state"] == "finished" and document["directory"] == "out"
    assert {p["n"] for p in document["summary"]} == {16, 32, 64}
    assert "128 of 128 (100 %)" in captured.err and "tokens/s" in captured.err
    run = json.loads((out / "run.json").read_text())
    assert run["sessions"][0]["command"] == ["quantlab", *ARGUMENTS, *TWO, "-o", "out", "--json"]
    assert "quantlab kl -M tiny-gdn" in (out / "index.html").read_text("utf-8")


def test_default_directory_is_found_again(backend, capsys):
    arguments = [*ARGUMENTS, *TWO, "--no-figures", "-q"]
    assert main(arguments) == 0
    (out,) = Path("runs").iterdir()
    assert out.name.startswith("kl-tiny-gdn-64-")
    assert main(arguments) == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert "finished already" in capsys.readouterr().err and backend.loads == 1
    assert main([*arguments, "--seed", "1"]) == 0 and len(list(Path("runs").iterdir())) == 2


def test_resume_with_another_spec_names_the_field(backend, capsys):
    assert main([*ARGUMENTS, *TWO, "-o", "out", "--no-figures"]) == 0
    assert main([*ARGUMENTS, *TWO, "-o", "out", "--resume", "--seed", "7"]) == 2
    assert "seed: 0 there, 7 now" in capsys.readouterr().err


def test_interrupted_and_resumed(backend, capsys):
    def stop(event, t):
        raise KeyboardInterrupt

    backend.hooks = stop
    assert main([*ARGUMENTS, *TWO, "-o", "out"]) == 130
    assert "--resume goes on" in capsys.readouterr().err
    backend.hooks = lambda event, t: None
    assert main([*ARGUMENTS, *TWO, "-o", "out", "--resume", "--no-figures"]) == 0
    assert load_result("out").finished


def test_save_every(backend, monkeypatch):
    seen = []
    real = run_module.run_batch
    monkeypatch.setattr(
        run_module,
        "run_batch",
        lambda *a, **k: (seen.append(k["checkpoint_seconds"]), real(*a, **k)),
    )
    assert main([*ARGUMENTS, *TWO, "-o", "out", "--no-figures", "--save-every", "7.5"]) == 0
    assert seen == [7.5, 7.5]


def test_failed_cells_are_3(backend, monkeypatch, capsys):
    real = backend.forcing

    def faulty(m, spec, tokens, *, streams, **kwargs):
        if streams == [0]:
            raise ValueError("cannot be")
        return real(m, spec, tokens, streams=streams, **kwargs)

    monkeypatch.setattr(backend, "forcing", faulty)
    assert main([*ARGUMENTS, *TWO, "-o", "out", "--no-figures"]) == 3
    captured = capsys.readouterr()
    assert "failed: streams [0]: ValueError: cannot be" in captured.err
    assert "mean over 1 stream" in captured.out


def test_full_disk_is_1_and_resumable(backend, monkeypatch, capsys):
    import errno
    import os

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main([*ARGUMENTS, *TWO, "-o", "out"]) == 1
    assert "no space left on the disk" in capsys.readouterr().err


def test_full_disk_for_the_figures_does_not_hide_the_table(backend, monkeypatch, capsys):
    from quantlab.study.store import RunDirectory

    real = RunDirectory.write

    def write(self, path, data):
        if path.suffix == ".png":
            raise RunError("no space left on the disk")
        real(self, path, data)

    monkeypatch.setattr(RunDirectory, "write", write)
    assert main([*ARGUMENTS, *TWO, "-o", "out"]) == 1
    captured = capsys.readouterr()
    assert "shared nvfp4-sr" in captured.out and "no space left" in captured.err


def test_directory_of_something_else(backend, capsys):
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("x")
    assert main([*ARGUMENTS, *TWO, "-o", "mine"]) == 2
    assert "thesis.tex" in capsys.readouterr().err


def test_report_again_and_of_what_is_not_a_run(backend, capsys):
    assert main([*ARGUMENTS, *TWO, "-o", "out", "--no-figures"]) == 0
    capsys.readouterr()
    assert main(["report", "out", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["files"][-1] == "out/index.html"
    assert main(["report", "out", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| policy | 16 | 64 |")
    assert main(["report", "."]) == 2
    Path("out/rows.parquet").write_bytes(b"PAR1")
    assert main(["report", "out"]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_dry_run_plans_and_writes_nothing(backend, monkeypatch, capsys):
    import quantlab.study.estimate as estimate_module

    monkeypatch.setattr(estimate_module, "Backend", lambda: backend)
    assert main([*ARGUMENTS, *TWO, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["seconds"] > 0 and plan["rows_of_results"] == 64 * 2 * 2
    assert main([*ARGUMENTS, *TWO, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "3 policies (the reference included) × 2 streams in 2 batches" in out
    assert "shared:float4_e2m1fn@block16" in out and "time" in out and "GiB" in out
    assert not Path("runs").exists()


def test_python_does_the_same(backend, capsys):
    result = quantlab.kl(
        "tiny-gdn", ["shared:nvfp4-sr"], tokens=64, streams=2, device="cpu", out="py", figures=False
    )
    assert main([*ARGUMENTS, *TWO, "-o", "cli", "--no-figures"]) == 0
    assert Path("py/rows.parquet").read_bytes() == Path("cli/rows.parquet").read_bytes()
    assert "shared nvfp4-sr" in str(result) and result.summary.num_rows == 6
    assert str(result) in capsys.readouterr().out


def test_python_takes_suites_and_refuses_nonsense():
    spec = build.build_spec("tiny-gdn", "replayssm", device="cpu")
    assert isinstance(spec, KlSpec) and len(spec.policies) == 9
    with pytest.raises(quantlab.errors.UsageError, match="Did you mean 'nvfp4'"):
        build.build_spec("tiny-gdn", ["shared:nvfp5"])
    with pytest.raises(TypeError, match="tokns"):
        build.build_spec("tiny-gdn", ["shared:fp8"], device="cpu", tokns=3)


def test_every_option_has_help():
    assert not [p.name for p in kl_command.params if not getattr(p, "help", None)]


@pytest.mark.parametrize(
    "seconds, text", [(0.2, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_rate_and_time_left_count_this_session_only():
    reporter = Reporter(quiet=True)
    reporter.start(1000, 500)
    reporter.advance(600)
    assert reporter.state(reporter.clock + 10) == "10 tokens/s, 40 s left"


def test_lines_off_a_terminal_are_rare(capsys):
    reporter = Reporter()
    reporter.start(100, 0)
    for done in range(1, 101):
        reporter.advance(done)
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2 and err[1].startswith("100 of 100 (100 %)")


def test_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Reporter() as reporter:
        reporter.start(100, 20)
        reporter.advance(60)
        reporter.note("a note [with brackets]")
        reporter.advance(100)
    err = capsys.readouterr().err
    assert "measuring" in err and "a note [with brackets]" in err
