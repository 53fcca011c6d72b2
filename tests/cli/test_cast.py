"""`quantlab cast`: the error table against numpy, what it writes, and bad files."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantlab.formats import encode, parse_format
from quantlab.formats.codes import unpack_nibbles
from quantlab_cli.main import main


@pytest.fixture
def state(tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 16, 128)).astype(np.float32)
    path = tmp_path / "state.npy"
    np.save(path, x)
    return path, x


def report(capsys, *arguments):
    assert main(["cast", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_error_table_of_fp16_is_numpys(state, capsys):
    path, x = state
    got = report(capsys, path, "-f", "fp16")
    error = x.astype(np.float16).astype(np.float64) - x
    sqnr = 10 * np.log10((x.astype(np.float64) ** 2).sum() / (error**2).sum())
    assert got["SQNR dB"] == pytest.approx(sqnr, rel=1e-12)
    assert got["max |error|"] == pytest.approx(abs(error).max(), rel=1e-12)
    assert got["max |error / x|"] == pytest.approx(abs(error / x).max(), rel=1e-12)
    assert got["mean error"] == pytest.approx(error.mean(), rel=1e-9)
    assert got["bits per element"] == 16 and got["elements"] == x.size
    assert got["format"] == "float16" and got["shape"] == [2, 16, 128]


def test_exact_format_loses_nothing(state, capsys):
    got = report(capsys, state[0], "-f", "fp32")
    assert got["SQNR dB"] is None and got["max |error|"] == 0


def test_seed_decides_stochastic_rounding(state, capsys):
    first, again, other = (
        report(capsys, state[0], "-f", "nvfp4-sr", "--seed", s)["RMS error"] for s in (0, 0, 1)
    )
    assert first == again != other


def test_counts(tmp_path, capsys):
    x = np.ones((32, 32), np.float32)
    x[0, 0], x[1, 1], x[2, 2] = np.inf, 1e6, 1e-9
    np.save(tmp_path / "x.npy", x)
    got = report(capsys, tmp_path / "x.npy", "-f", "fp16")
    assert got["non-finite inputs"] == 1 and got["clipped"] == 1 and got["flushed to zero"] == 1
    assert got["non-finite outputs"] == 2


def test_table_on_stdout(state, capsys):
    assert main(["cast", str(state[0]), "-f", "nvfp4"]) == 0
    out = capsys.readouterr().out
    assert "SQNR dB" in out and "float4_e2m1fn@block16" in out and "bits per element" in out


@pytest.mark.parametrize("name", ["nvfp4", "int4@key", "int8@row", "fp16"])
def test_out_holds_codes_scales_and_the_format(name, state, tmp_path, capsys):
    path, x = state
    out = tmp_path / "codes.safetensors"
    assert main(["cast", str(path), "-f", name, "-o", str(out)]) == 0
    tensors = load_file(out)
    with safe_open(out, framework="pt") as file:
        metadata = file.metadata()
    fmt = parse_format(metadata["format"])
    assert fmt == parse_format(name) and json.loads(metadata["shape"]) == list(x.shape)
    encoded = encode(torch.from_numpy(x), fmt)
    codes = tensors["codes"]
    if metadata["codes_per_item"] == "2":
        codes = unpack_nibbles(codes, 128, signed=name.startswith("int"))
    assert torch.equal(codes, encoded.codes)
    # What is written takes the bits that are reported: every state of a file is the same size.
    written = sum(t.nbytes for t in tensors.values())
    assert 8 * written == float(fmt.bits_per_element(16, 128)) * x.size


def test_safetensors_key(tmp_path, capsys):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4, 16, dtype=torch.bfloat16), "b": torch.zeros(4, 16)}, path)
    assert report(capsys, path, "-f", "fp8", "--key", "a")["elements"] == 64
    assert main(["cast", str(path), "-f", "fp8"]) == 2
    assert "holds 2 tensors: name one with --key (a, b)" in capsys.readouterr().err
    assert main(["cast", str(path), "-f", "fp8", "--key", "c"]) == 2
    assert "--key 'c'" in capsys.readouterr().err


def test_bad_files(tmp_path, capsys):
    def fails(code, message, *arguments):
        assert main(["cast", *map(str, arguments)]) == code
        err = capsys.readouterr().err
        assert message in err and "Traceback" not in err

    good = tmp_path / "x.npy"
    np.save(good, np.ones((4, 4), np.float32))
    fails(2, "no such file", tmp_path / "none.npy", "-f", "fp8")
    fails(2, "expected a .npy or .safetensors", tmp_path / "x.pt", "-f", "fp8")
    fails(2, "Did you mean 'nvfp4'", good, "-f", "nvfp5")
    fails(2, "--out", good, "-f", "fp8", "-o", tmp_path / "codes.npz")
    fails(1, "cannot be written", good, "-f", "fp8", "-o", tmp_path / "no" / "c.safetensors")
    for name, content in (("cut.npy", good.read_bytes()[:90]), ("cut.safetensors", b"\x08")):
        (tmp_path / name).write_bytes(content)
        fails(1, "cannot be read", tmp_path / name, "-f", "fp8")
    np.save(tmp_path / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    fails(1, "cannot be read", tmp_path / "pickle.npy", "-f", "fp8")
    np.save(tmp_path / "ints.npy", np.ones((4, 4), np.int64))
    fails(2, "expected a floating-point tensor", tmp_path / "ints.npy", "-f", "fp8")
    np.save(tmp_path / "flat.npy", np.ones(4, np.float32))
    fails(2, "expected a state [..., dv, dk], got shape [4]", tmp_path / "flat.npy", "-f", "fp8")
