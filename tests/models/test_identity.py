from __future__ import annotations

from types import ModuleType

import pytest
import torch

from quantlab.errors import UsageError
from quantlab.models import FAMILIES, Family, dispatch, identity, registry
from tests.models.tiny import FAMILY_NAMES, tiny


def test_the_registry_and_the_tiny_models_name_the_same_families():
    assert set(FAMILIES) == set(FAMILY_NAMES)


def test_a_family_is_found_by_its_own_or_a_nested_model_type():
    for name, family in FAMILIES.items():
        assert registry.family_of({"model_type": name}) is family
        for nested in family.config_types:
            assert registry.family_of({"model_type": nested}) is family
            wrapped = {"model_type": "some_vlm", "text_config": {"model_type": nested}}
            assert registry.family_of(wrapped) is family
    for other in ({}, {"model_type": "llama"}, {"model_type": 3}, {"text_config": 3}):
        assert registry.family_of(other) is None


def test_a_family_cannot_be_registered_twice():
    twice = Family(model_type="bamba", op="mamba2", mixer="X")
    with pytest.raises(ValueError, match="registered twice"):
        registry._table((*FAMILIES.values(), twice))


def test_op_implementation_is_read_off_what_transformers_bound(monkeypatch):
    """C08: a module whose op was bound to fla's kernel is another implementation, by name."""
    assert identity.op_implementation(FAMILIES["qwen3_5"]) == "torch"

    def bound(implementation):
        def wrapped(*args, **kwargs):
            return implementation(*args, **kwargs)

        return wrapped

    def kernel(): ...

    kernel.__module__ = "fla.ops.gated_delta_rule.chunk"
    module = ModuleType("modeling")
    for name in FAMILIES["qwen3_5"].functions:
        setattr(module, name, bound(kernel))
    monkeypatch.setattr(dispatch, "_ORIGINALS", {})
    monkeypatch.setattr(dispatch.importlib, "import_module", lambda path: module)
    assert identity.op_implementation(FAMILIES["qwen3_5"]).startswith("fla")


def test_a_version_without_the_op_is_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "_ORIGINALS", {})
    monkeypatch.setattr(dispatch.importlib, "import_module", lambda path: ModuleType("empty"))
    with pytest.raises(UsageError, match="this version of qwen3_5 is not adapted"):
        dispatch.original(FAMILIES["qwen3_5"], "torch_chunk_gated_delta_rule")


def test_mixed_arms_are_refused():
    a = tiny("mamba2").identity
    identity.refuse_mixed(a, dict(a))
    for key, value in (
        ("op_implementation", "mamba_ssm 2.3"),
        ("transformers", "5.0"),
        ("dtype", "bfloat16"),
        ("sha256", "sha256:0"),
        ("time_step_limit", [0.001, "inf"]),
    ):
        with pytest.raises(UsageError, match=key):
            identity.refuse_mixed(a, {**a, key: value})


def test_time_step_limits_must_agree():
    m = tiny("mamba2")
    m.recurrent_modules[0].time_step_limit = (0.5, 1.0)
    with pytest.raises(UsageError, match="disagree"):
        identity.limit_of(m)
    assert identity.limit_of(tiny("qwen3_5")) is None


def test_loaded_model_properties():
    m = tiny("qwen3_5", dtype=torch.bfloat16)
    assert m.layers == 3 and m.vocab_size == 96
    assert m.recurrent_shapes == [(4, 24, 16)] * 3
    assert m.activation_dtype == torch.bfloat16 and m.device.type == "cpu"
    assert tiny("nemotron_h").recurrent_shapes == [(4, 16, 24)] * 3
    assert tiny("kimi_linear").recurrent_shapes == [(4, 16, 16)] * 3


def test_every_public_name_exists():
    import quantlab.models

    assert sorted(quantlab.models.__all__) == sorted(set(quantlab.models.__all__))
    for name in quantlab.models.__all__:
        assert getattr(quantlab.models, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = quantlab.models.nothing


def test_presets_and_registry_import_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, quantlab.models as m; m.PRESETS, m.FAMILIES, m.resolve('qwen3.5-4b'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
