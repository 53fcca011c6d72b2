"""Loading: what is refused before a weight is read, with which exit code, and what is recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantlab.errors import MissingAsset, QuantlabError, RunError, UsageError
from quantlab.models import PRESETS, check, checkpoint, forward, load, load_model, resolve, source
from quantlab.models.check import check_model, load_checked
from quantlab.models.load import quiet_transformers
from tests.models.tiny import FAMILY_NAMES, tiny_hf, tokens


@pytest.fixture(autouse=True)
def _quiet():
    with quiet_transformers(), torch.inference_mode():
        yield


@pytest.fixture
def saved(tmp_path_factory) -> Path:
    """A fresh copy of a one-file checkpoint, to be damaged."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_hf("nemotron_h").save_pretrained(path)
    return path


@pytest.fixture
def sharded(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_hf("nemotron_h").save_pretrained(path, max_shard_size="60KB")
    assert (path / checkpoint.INDEX).is_file()
    return path


@pytest.fixture
def no_weights_read(monkeypatch):
    """Fail where a weight would be loaded: errors must come before."""

    def reached(*_):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(load, "_load", reached)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_saved_checkpoint_loads_to_the_same_logits(family, tmp_path):
    model, x = tiny_hf(family), tokens(2, 11)
    model.save_pretrained(tmp_path)
    m = load_model(str(tmp_path))
    assert m.family.model_type == family and m.activation_dtype == torch.float32
    assert torch.equal(forward.call(m.model, x).logits, forward.call(model, x).logits)
    assert m.identity["origin"] == "path" and m.identity["sha256"].startswith("sha256:")
    assert "/" not in m.identity["name"] and "path" not in m.identity
    assert m.identity["dtype"] == "float32" and m.identity["op_implementation"]
    assert json.loads(json.dumps(m.identity, allow_nan=False)) == m.identity
    assert m.tokenizer is None


def test_shards_load_to_the_same_logits(saved, sharded):
    x = tokens(1, 5)
    a, b = (forward.call(load_model(str(p)).model, x).logits for p in (saved, sharded))
    assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_multimodal_checkpoint_loads_its_text_model(family, tmp_path):
    """The hub's Qwen3.5 checkpoints hold a vision tower beside the text model."""
    import transformers

    prefix = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family]
    text = tiny_hf(family)
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 64, "num_position_embeddings": 16,
    }  # fmt: skip
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text.config.to_dict(), vision_config=vision
    )
    whole = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    m = load_model(str(tmp_path))
    x = tokens(2, 9)
    assert torch.equal(forward.call(m.model, x).logits, forward.call(text, x).logits)
    assert not any("visual" in name for name, _ in m.model.named_parameters())
    # The vision tower is not counted as something that must fit.
    assert m.identity["parameters"] == sum(p.numel() for p in text.parameters())
    assert check_model(m).passed


def test_dtype_is_the_checkpoints_own_unless_said(tmp_path):
    tiny_hf("qwen3_5").bfloat16().save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).activation_dtype == torch.bfloat16
    wide = load_model(str(tmp_path), dtype="fp32")
    assert wide.activation_dtype == torch.float32 and wide.identity["dtype"] == "float32"
    with pytest.raises(UsageError, match="unknown dtype 'fp8'"):
        load_model(str(tmp_path), dtype="fp8")


def test_zoo_runs_in_fp32_on_a_cpu(tmp_path, monkeypatch):
    tiny_hf("nemotron_h").bfloat16().save_pretrained(tmp_path)
    monkeypatch.setattr(source, "_zoo", lambda: {"tiny-x": SimpleNamespace(path=tmp_path)})
    m = load_model("tiny-x")
    assert m.activation_dtype == torch.float32 and m.identity["origin"] == "zoo"
    # Bytes need no tokenizer files: id = byte + 3.
    assert m.tokenizer("ab", add_special_tokens=False)["input_ids"] == [100, 101]
    assert load_model("tiny-x", dtype="bf16").activation_dtype == torch.bfloat16


def test_time_step_limit_of_a_checkpoint(saved):
    assert load_model(str(saved)).identity["time_step_limit"] == [0.001, "inf"]
    free = load_model(str(saved), time_step_limit=(0.0, float("inf")))
    assert free.identity["time_step_limit"] == [0.0, "inf"]
    assert check_model(free).passed  # transformers' prefill obeys it too


def test_load_checked_raises_with_the_table(saved, monkeypatch):
    m, report = load_checked(str(saved))
    assert report.passed and m.layers == 3
    monkeypatch.setattr(check, "exact_op", lambda c: (2 * c.inputs.v, None))
    with pytest.raises(RunError, match="FAIL  our op in its place"):
        load_checked(str(saved))


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3.5-4", "did you mean qwen3.5-4b?"),
        ("QWEN3.5-4B", "did you mean qwen3.5-4b?"),
        ("nemotron-3-nano", "did you mean nemotron-3-nano-4b?"),
        ("zzzz", "known names are"),
        ("./nowhere", "no such directory"),
        ("a/b/c", "no such directory"),
    ],
)
def test_unknown_names(name, message, no_weights_read):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")) as caught:
        load_model(name)
    assert caught.value.exit_code == 2


def test_unknown_name_lists_what_is_known(no_weights_read):
    with pytest.raises(UsageError) as caught:
        load_model("zzzz")
    assert all(name in str(caught.value) for name in (*PRESETS, *FAMILY_NAMES))


def test_zoo_checkpoint_that_was_not_installed(tmp_path, monkeypatch, no_weights_read):
    monkeypatch.setattr(source, "_zoo", lambda: {"tiny-x": SimpleNamespace(path=tmp_path)})
    with pytest.raises(MissingAsset, match="not in this installation") as caught:
        load_model("tiny-x")
    assert caught.value.exit_code == 5


def test_every_preset_resolves_to_a_hub_id():
    for name, preset in PRESETS.items():
        found = resolve(name)
        assert found.origin == "preset" and found.hub_id == preset.hub_id
        assert source._HUB_ID.fullmatch(preset.hub_id)


# --- directories -------------------------------------------------------------------------------


def refused(path: Path, kind: type[QuantlabError], *fragments: str, **options) -> None:
    with pytest.raises(kind) as caught:
        load_model(str(path), **options)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert caught.value.exit_code == {UsageError: 2, MissingAsset: 5, RunError: 1}[kind]


def refused_at_once(path: Path, kind: type[QuantlabError], *fragments: str) -> None:
    """As soon as the name is resolved, before data or torch are touched, and on loading."""
    with pytest.raises(kind):
        resolve(str(path))
    refused(path, kind, *fragments)


def test_no_config(tmp_path, no_weights_read):
    refused_at_once(tmp_path, UsageError, "has no config.json")
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"")
    refused_at_once(file, UsageError, "is a file")


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_unreadable_config(saved, text, no_weights_read):
    (saved / "config.json").write_text(text)
    refused_at_once(saved, UsageError, "config.json")


def test_other_family(saved, no_weights_read):
    (saved / "config.json").write_text('{"model_type": "llama"}')
    refused_at_once(saved, UsageError, "'llama' is not an adapted family", *FAMILY_NAMES)


def damaged(path: Path, how: str) -> None:
    file = path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes(
        {
            "cut": data[:-100],
            "cut in the header": data[: 8 + length // 2],
            "empty": b"",
            "grown": data + b"\0" * 8,
            "garbage": b"\xff" * 200,
            "header garbage": data[:8] + b"x" * length + data[8 + length :],
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        }[how]
    )


@pytest.mark.parametrize(
    "how",
    ["cut", "cut in the header", "empty", "grown", "garbage", "header garbage", "pointer"],
)
def test_damaged_weights(saved, how, no_weights_read):
    damaged(saved, how)
    refused_at_once(
        saved, RunError, "model.safetensors", "LFS" if how == "pointer" else "fetch it again"
    )


def test_missing_weights(saved, sharded, no_weights_read):
    (saved / "model.safetensors").unlink()
    refused_at_once(saved, MissingAsset, "holds no weights")
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    refused_at_once(sharded, MissingAsset, victim.name, "download")


def test_unreadable_index(sharded, no_weights_read):
    (sharded / checkpoint.INDEX).write_text('{"weight_map": 3}')
    refused_at_once(sharded, RunError, checkpoint.INDEX)


def test_missing_tensors_are_not_left_random(saved):
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved / "model.safetensors")
    name = next(n for n in sorted(tensors) if n.endswith("A_log"))
    del tensors[name]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    refused(saved, RunError, name.split(".", 1)[1], "would be random")


# --- device ------------------------------------------------------------------------------------


def test_does_not_fit(saved, monkeypatch, no_weights_read):
    monkeypatch.setattr(load, "free_host_bytes", lambda: 10**8)
    refused(saved, RunError, "does not fit", "GiB free")


def test_memory_counts_the_dtype_asked_for(saved):
    found = checkpoint.read_checkpoint(saved)
    assert found.bytes_in(4) == 2 * found.bytes_in(2) == 4 * found.parameters


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_absent_device(saved, no_weights_read):
    refused(saved, UsageError, "no CUDA device", device="cuda")
    refused(saved, UsageError, "unknown device", device="gpu0")
    refused(saved, UsageError, "unknown device", device="meta")


# --- the hub -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3.5-4b", "some-org/some-model"])
def test_missing_checkpoint_offline(name, offline, no_weights_read):
    with pytest.raises(MissingAsset) as caught:
        load_model(name)
    message = str(caught.value)
    hub_id = PRESETS[name].hub_id if name in PRESETS else name
    assert f"hf download {hub_id}" in message
    assert str(offline) in message and "HF_HUB_OFFLINE" in message
    assert caught.value.exit_code == 5


def in_hub_cache(hub: Path, model: Path, hub_id: str, commit: str) -> Path:
    """Lay a checkpoint out as the hub cache does."""
    home = hub / f"models--{hub_id.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(model, home / "snapshots" / commit))


def test_cached_checkpoint_loads_offline(saved, offline):
    commit = "0123456789abcdef0123456789abcdef01234567"
    in_hub_cache(offline, saved, "some-org/some-model", commit)
    m = load_model("some-org/some-model")
    assert m.identity["revision"] == commit and m.identity["sha256"] is None
    assert m.identity["hub_id"] == "some-org/some-model" and m.identity["origin"] == "hub"
    assert check_model(m).passed


def test_half_cached_checkpoint_offline(sharded, offline, no_weights_read):
    snapshot = in_hub_cache(offline, sharded, "some-org/some-model", "0" * 40)
    next(snapshot.glob("*.safetensors")).unlink()
    with pytest.raises(MissingAsset, match="hf download some-org/some-model"):
        load_model("some-org/some-model")


def test_hub_config_is_judged_before_its_weights(sharded, offline, monkeypatch, no_weights_read):
    """A repository that cannot be used is refused on its description, weights not yet there."""
    snapshot = in_hub_cache(offline, sharded, "some-org/some-model", "0" * 40)
    for file in snapshot.glob("*.safetensors"):
        file.unlink()
    index = json.loads((snapshot / checkpoint.INDEX).read_text())
    index["metadata"]["total_size"] = 10**15
    (snapshot / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(RunError, match="does not fit"):
        load_model("some-org/some-model")
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="not an adapted family"):
        load_model("some-org/some-model")


def test_weights_digest_depends_on_every_byte(saved, monkeypatch):
    found = checkpoint.read_checkpoint(saved)
    whole = checkpoint.weights_digest(found)
    monkeypatch.setattr(checkpoint, "HASH_LIMIT", 0)
    assert checkpoint.weights_digest(found).startswith("sha256-headers:")
    monkeypatch.undo()
    file = found.shards[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert checkpoint.weights_digest(found) != whole
