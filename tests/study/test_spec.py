"""The spec: sizes, names, and that it comes back from JSON as it went."""

import json

import pytest

from quantlab.errors import RunError, UsageError
from quantlab.models.load import DTYPES as MODEL_DTYPES
from quantlab.replay.policy import parse_policy
from quantlab.study.spec import DTYPES, KlSpec, differences
from tests.study.fake import make_spec


def test_json_round_trip():
    spec = make_spec(seed=2**64 - 1, dtype="bf16", batch_rows=40)
    text = json.dumps(spec.to_json())
    assert KlSpec.from_json(json.loads(text)) == spec
    assert "float4_e2m1fn" in text and "nvfp4" not in text


def test_names_known_without_torch_are_the_real_ones():
    assert set(DTYPES) == set(MODEL_DTYPES)


@pytest.mark.parametrize("name", ["tokens", "streams", "prompt", "batch_rows", "segment"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_are_positive(name, value):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} must be positive"):
        make_spec(**{name: value})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seed": -1}, "--seed must be in"),
        ({"seed": 2**64}, "--seed must be in"),
        ({"engine": "windoed"}, "did you mean windowed"),
        ({"dtype": "bf17"}, "did you mean bf16"),
        ({"device": "cudda"}, "use cpu, cuda or cuda:<index>"),
        ({"batch_rows": 1}, "rows \\(got 1\\)"),
        ({"segment": 100, "tokens": 128}, "nearest 128"),
        ({"policies": ()}, "at least one policy"),
        ({"policies": (parse_policy("shared:fp8"),) * 2}, "given twice: shared:float8"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        make_spec(**changes)


def test_floor_is_the_shared_fp32_replay():
    assert make_spec().floor == parse_policy("shared:fp32")
    assert make_spec(policies=(parse_policy("conventional"),)).floor is None


def test_digest_tells_specs_apart():
    assert make_spec().digest() == make_spec().digest() != make_spec(seed=1).digest()


def test_differences_name_the_field():
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 1}, "c": 2}) == ""
    assert differences({"a": {"b": 1}}, {"a": {"b": 2}, "d": 3}) == (
        "a.b: 1 there, 2 now; d: null there, 3 now"
    )


@pytest.mark.parametrize("value", [{}, {"policies": ["nope"]}, {"policies": [], "x": 1}])
def test_not_a_spec(value):
    with pytest.raises(RunError, match="not the spec of a KL study"):
        KlSpec.from_json(value)
