"""Every study of a decay per key channel, end to end: a checkpoint of tiny-kda's recipe, random."""

import json
import math

import pyarrow.parquet as pq
import pytest
import torch

from quantlab.models.zoo.initialise import channel_factors, half_lives
from quantlab_cli.main import main
from tests.models.small_kda import save_small_kda


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("kda") / "small-kda"
    return path, save_small_kda(path)


@pytest.fixture
def run(checkpoint, tmp_path, capsys):
    """Run a study of 48 positions: its JSON document and its directory."""

    def call(*words, options=()):
        out = tmp_path / "run"
        common = ["-M", str(checkpoint[0]), "--data", "books", "--device", "cpu", "-N", "48"]
        common += ["--streams", "1", "--prompt", "16", "-q", "--no-figures", "--json"]
        assert main([*words, *common, *options, "-o", str(out)]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1]), out

    return call


def kl_by_policy(directory):
    rows = pq.read_table(directory / "rows.parquet").to_pylist()
    found = {}
    for row in rows:
        found.setdefault(row["policy"], []).append(row["kl"])
    return {policy: sum(values) / len(values) for policy, values in found.items()}


def test_kl_orders_formats(run):
    _, directory = run("kl", options=["--shared", "nvfp4-sr", "--policy", "shared:fp8-sr"])
    kl = kl_by_policy(directory)
    floor, fp8, nvfp4 = (
        next(v for k, v in kl.items() if part in k) for part in ("float32", "float8", "float4")
    )
    assert all(map(math.isfinite, kl.values()))
    assert floor < fp8 < nvfp4


def test_an_ablation_of_corrections(run):
    document, _ = run("ablate", "correction")
    assert document["state"] == "finished" and document["table"]


def test_propagation_follows_every_key_channel(run, checkpoint):
    _, directory = run("propagate", options=["--policy", "shared:fp8-sr", "-L", "4"])
    model = checkpoint[1]
    units = pq.read_table(directory / "units.parquet").to_pylist()
    layers, heads, dk = 2, 2, model.config["linear_head_dim"]
    found = {}
    for unit in units:
        assert math.isfinite(unit["deviation"]) and math.isfinite(unit["output_error"])
        found[unit["layer"], unit["head"], unit["key"]] = unit["half_life"]
    assert len(found) == layers * heads * dk
    lives = torch.tensor(
        [[[found[i, h, c] for c in range(dk)] for h in range(heads)] for i in range(layers)]
    )
    want = half_lives(model.half_lives, layers, heads)[..., None]
    want = want / channel_factors(model.half_lives, dk)
    # The gates' input moves a random model's decays by a tenth or so; neighbouring channels differ
    # by a factor of 5 and more, so that channels in another order cannot pass.
    assert (lives.log() - want.log()).abs().max() < 0.7
