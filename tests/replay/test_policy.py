"""Policies: names in, names out, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.formats import FormatError, parse_format
from quantlab.replay import SUITES, Policy, PolicyError, parse_policy, suite

FORMATS = ("fp32", "fp16-sr", "bf16", "fp8-sr", "nvfp4", "int8@row", "fp8@tile32x128:qmax=240")
formats = st.sampled_from(FORMATS).map(parse_format)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    kind = draw(st.sampled_from(("conventional", "shared", "separate")))
    read = draw(formats)
    return Policy(
        kind=kind,
        read=read,
        recur=draw(formats) if kind == "separate" else read,
        window=draw(st.integers(2 if kind == "separate" else 1, 100)),
        records=draw(st.sampled_from(("auto", "bf16", "fp32", "exact"))),
        corrections=draw(st.sampled_from(("rederive", "fold"))),
    )


@given(policies())
def test_prints_what_it_parses(policy: Policy) -> None:
    assert parse_policy(str(policy)) == policy
    assert (
        parse_policy(
            policy.short.replace("shared ", "shared:").replace("conventional ", "conventional:")
        )
        == policy
    )


@pytest.mark.parametrize(
    ("text", "long", "short"),
    [
        ("shared:nvfp4-sr", None, "shared nvfp4-sr"),
        ("nvfp4/fp16-sr", None, "nvfp4 / fp16-sr"),
        ("nvfp4 / fp16-sr", None, "nvfp4 / fp16-sr"),
        ("  nvfp4/  fp16-sr ", None, "nvfp4 / fp16-sr"),
        ("conventional", "conventional:float32", "conventional fp32"),
        ("conventional:fp8-sr", "conventional:float8_e4m3fn@block128-sr", "conventional fp8-sr"),
        ("shared: fp16 L=4", "shared:float16 L=4", "shared fp16 L=4"),
    ],
)  # fmt: skip
def test_names(text: str, long: str | None, short: str) -> None:
    policy = parse_policy(text)
    assert policy.short == short
    if long is not None:
        assert str(policy) == long


def test_keywords_fill_in_what_the_text_leaves_open() -> None:
    policy = parse_policy("shared:fp8-sr L=4", window=32, records="bf16", corrections="fold")
    assert (policy.window, policy.records, policy.corrections) == (4, "bf16", "fold")
    assert parse_policy("shared:fp8-sr", window=32).window == 32
    assert parse_policy("conventional:fp8-sr", window=32).window == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shred:fp8", "Did you mean 'shared'"),
        ("nvfp4-sr", "'shared:nvfp4-sr'"),
        ("shared", "needs a format"),
        ("shared:", "needs a format"),
        ("conventional:", "no format after"),
        ("a/b/c", "READ / RECUR"),
        ("/fp16", "READ / RECUR"),
        ("shared:fp8 l=4", "Did you mean 'L'"),
        ("shared:fp8 L=4 L=5", "twice"),
        ("shared:fp8 L=four", "whole number"),
        ("shared:fp8 L=0", "≥ 1"),
        ("nvfp4 / fp16-sr L=1", "never be read"),
        ("shared:fp8 records=bf61", "Did you mean 'bf16'"),
        ("shared:fp8 corrections=refold", "Did you mean 'fold'"),
        ("", "Known forms"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises((PolicyError, FormatError), match=message):
        parse_policy(text)


def test_an_unknown_format_is_the_formats_error() -> None:
    for text in ("shared:nvpf4", "nvpf4 / fp16", "nvpf4"):
        with pytest.raises(FormatError, match="Did you mean 'nvfp4'"):
            parse_policy(text)


def test_one_copy_has_one_format() -> None:
    with pytest.raises(PolicyError, match="one copy"):
        Policy(kind="shared", read=parse_format("fp8"), recur=parse_format("fp16"))


def test_suite() -> None:
    assert [p.short for p in SUITES["replayssm"]] == [
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
    assert {p.window for p in suite("replayssm", window=4)} == {4}
    with pytest.raises(PolicyError, match="Did you mean 'replayssm'"):
        suite("replay-ssm")


def test_names_need_no_torch() -> None:
    code = "import sys, quantlab.replay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
