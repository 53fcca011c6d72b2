"""Philox-4x32-10: known answers, Triton's generator, and the counter layout."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from quantlab.formats import philox
from quantlab.formats.philox import philox4x32, seed_key, sr_words

KNOWN = json.loads((Path(__file__).parents[1] / "reference" / "philox4x32.json").read_text())


def plain_philox(counter: list[int], key: tuple[int, int], rounds: int = 10) -> list[int]:
    """Philox as the paper writes it, in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def ints(words: list[str]) -> list[int]:
    return [int(w, 16) for w in words]


@pytest.mark.parametrize("case", KNOWN["vectors"], ids=["zeros", "ones", "pi"])
def test_known_answers(case: dict[str, list[str]]) -> None:
    c0, c1, c2, c3 = (torch.tensor([w]) for w in ints(case["counter"]))
    k0, k1 = ints(case["key"])
    words = philox4x32((c0, c1, c2, c3), (k0, k1))
    assert [int(w) for w in words] == ints(case["words"])
    assert plain_philox(ints(case["counter"]), (k0, k1)) == ints(case["words"])


@pytest.mark.parametrize("rounds", [1, 5, 7, 10])
def test_random_counters_against_plain_integers(rounds: int) -> None:
    gen = torch.Generator().manual_seed(0)
    c = [torch.randint(0, 1 << 32, (50,), generator=gen) for _ in range(4)]
    c[0][0], c[2][1] = (1 << 32) - 1, 1 << 31  # products beyond the sign bit
    key = seed_key(-12345678901234567)
    words = philox4x32((c[0], c[1], c[2], c[3]), key, rounds=rounds)
    for i in range(50):
        want = plain_philox([int(w[i]) for w in c], key, rounds)
        assert [int(w[i]) for w in words] == want


def test_counters_broadcast() -> None:
    c0, c2 = torch.arange(6)[None, :], torch.tensor([[4], [9]])
    one, key = torch.tensor(7), (3, 1 << 31)
    words = philox4x32((c0, one, c2, torch.tensor([[1]])), key)
    assert all(w.shape == (2, 6) for w in words)
    assert [int(w[1, 5]) for w in words] == plain_philox([5, 7, 9, 1], key)


def test_counter_layout() -> None:
    """The word of an element is philox((element // 4, flush, stream, layer + 2^24 copy))[e % 4]."""
    seed = -(1 << 40) + 3
    words = sr_words(
        seed=seed, layer=5, copy=1, stream=torch.tensor([9, 2]), flush=7, heads=2, dv=3, dk=5
    )
    assert words.shape == (2, 2, 3, 5) and words.dtype == torch.int64
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    for row, stream in enumerate((9, 2)):
        want = [plain_philox([quad, 7, stream, 5 + (1 << 24)], key) for quad in range(8)]
        assert words[row].flatten().tolist() == np.concatenate(want)[:30].tolist()


def test_flush_may_be_a_tensor_and_ids_are_32_bits_wide() -> None:
    common = {"seed": 1 << 63, "layer": 3, "copy": 0, "heads": 1, "dv": 2, "dk": 4}
    streams = torch.tensor([(1 << 32) - 1, 0])
    one = sr_words(stream=streams, flush=(1 << 32) - 1, **common)
    two = sr_words(stream=streams, flush=torch.tensor((1 << 32) - 1), **common)
    assert torch.equal(one, two)
    want = plain_philox([1, (1 << 32) - 1, (1 << 32) - 1, 3], (0, 1 << 31))
    assert one[0].flatten()[4:].tolist() == want


def test_chunking_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"seed": 2, "layer": 0, "copy": 0, "flush": 9, "heads": 3, "dv": 5, "dk": 7}
    whole = sr_words(stream=torch.arange(3), **common)
    monkeypatch.setattr(philox, "_CHUNK", 8)
    assert torch.equal(sr_words(stream=torch.arange(3), **common), whole)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1 << 64}, "64 bits"),
        ({"layer": 1 << 24}, "layer"),
        ({"copy": 256}, "copy"),
        ({"flush": -1}, "flush"),
        ({"stream": torch.zeros(2, 2, dtype=torch.int64)}, "one id per row"),
    ],
)
def test_counters_that_do_not_fit_are_refused(change: dict[str, object], says: str) -> None:
    good = {"seed": 1, "layer": 0, "copy": 0, "stream": torch.arange(2), "flush": 0}
    with pytest.raises(ValueError, match=says):
        sr_words(**(good | change), heads=1, dv=2, dk=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key words"):
        philox4x32((torch.arange(1),) * 4, (-1, 0))


def test_words_equal_triton_philox(tmp_path: Path) -> None:
    """Bit for bit with `tl.philox` in Triton's interpreter: seeds, wide counters, other rounds."""
    pytest.importorskip("triton")
    cases = [
        # seed, flush, stream, layer + 2^24 copy, quads, rounds
        [1234, 3, 2, 5, 10_241, 10],
        [-(1 << 62) - 5, (1 << 32) - 1, (1 << 31) + 7, 6 + (1 << 24), 300, 10],
        [(1 << 40) + 1, 0, 0, 0, 40, 7],
    ]
    path = tmp_path / "words.npz"
    worker = Path(__file__).with_name("triton_philox_worker.py")
    command = [sys.executable, str(worker), str(path), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs = np.load(path)
    for i, (seed, flush, stream, place, quads, rounds) in enumerate(cases):
        ours = sr_words(
            seed=seed, layer=place % (1 << 24), copy=place >> 24, stream=torch.tensor([stream]),
            flush=flush, heads=1, dv=1, dk=4 * quads, rounds=rounds,
        )  # fmt: skip
        assert (ours.flatten().numpy() == theirs[str(i)]).all()
