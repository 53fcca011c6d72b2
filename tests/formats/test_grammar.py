"""Names: reading, printing, errors, bits per element, and the survey's rows."""

import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantlab.formats import ELEMENTS, FORMATS, PRESETS, FormatError, parse_format
from quantlab.formats.element import FloatElement

VALID = st.deferred(lambda: st.one_of(_unscaled(), _scaled(), _named()))


def _unscaled() -> st.SearchStrategy[str]:
    wide = st.sampled_from(["float32", "fp64", "float16", "fp16-sr", "bf16", "bfloat16-sr"])
    narrow = st.builds(
        lambda n, o, r: n + "@none" + o + r,
        st.sampled_from(["fp8", "float8_e5m2", "fp8-fnuz"]),
        st.sampled_from(["", ":overflow=ieee", ":overflow=saturate"]),
        st.sampled_from(["", "-sr", "-rtn"]),
    )
    return st.one_of(wide, narrow, st.just("fp16:overflow=saturate-sr"))


@st.composite
def _scaled(draw: st.DrawFn) -> str:
    elements = [e for e in ELEMENTS.values() if not (isinstance(e, FloatElement) and e.bits > 8)]
    element = draw(st.sampled_from(elements))
    side = st.integers(1, 100_000)
    axis = draw(
        st.one_of(
            st.sampled_from(["row", "key", "state"]),
            side.map(lambda n: f"block{n}"),
            st.tuples(side, side).map(lambda t: f"tile{t[0]}x{t[1]}"),
        )
    )
    options = []
    if draw(st.booleans()):
        grid = [v for v in (1, 1.5, 2, 3, 4, 6, 7, 31, 127, 240, 448) if element.holds(Fraction(v))]
        options.append(f"qmax={draw(st.sampled_from(grid))}")
    kind = draw(st.sampled_from(["", "fp32", "bf16", "float16", "e8m0", "float8_e4m3fn"]))
    if kind:
        options.append(f"scale={kind}")
    if kind == "e8m0" and draw(st.booleans()):
        options.append(f"mode={draw(st.sampled_from(['floor', 'ceil', 'rceil', 'even']))}")
    if kind in ("bf16", "float16", "float8_e4m3fn") and draw(st.booleans()):
        options.append(f"scale_round={draw(st.sampled_from(['nearest', 'up']))}")
    if kind == "float8_e4m3fn" and draw(st.booleans()):
        options.append("state_scale=fp32")
    options = draw(st.permutations(options))
    name = draw(st.sampled_from([element.name, element.alias]))
    text = f"{name}@{axis}" + (":" + ",".join(options) if options else "")
    return text + draw(st.sampled_from(["", "-rtn", "-sr"]))


def _named() -> st.SearchStrategy[str]:
    return st.one_of(
        st.sampled_from([*PRESETS, *FORMATS]),
        st.sampled_from(["nvfp4:scale_round=up-sr", "mxfp4:mode=even", "fp8-e5m2-sr"]),
    )


@settings(max_examples=1000, deadline=None)
@given(VALID)
def test_print_then_parse_is_the_identity(text: str) -> None:
    fmt = parse_format(text)
    assert parse_format(str(fmt)) == fmt
    assert parse_format(fmt.short) == fmt
    assert str(parse_format(str(fmt))) == str(fmt)
    assert len(fmt.short) <= len(str(fmt))
    assert fmt.element.name in str(fmt)


@settings(max_examples=300, deadline=None)
@given(st.text("fpint8463x@:=,-_rowblcktesaqm 0123.", max_size=40))
def test_any_text_is_a_format_or_a_format_error(text: str) -> None:
    try:
        fmt = parse_format(text)
    except FormatError:
        return
    assert parse_format(str(fmt)) == fmt


@pytest.mark.parametrize(
    ("text", "canonical", "short"),
    [
        ("fp8", "float8_e4m3fn@block128", "fp8"),
        ("float8_e4m3fn-sr", "float8_e4m3fn@block128-sr", "fp8-sr"),
        ("fp8@tile1x128-rtn", "float8_e4m3fn@block128", "fp8"),
        ("fp8-e5m2-sr", "float8_e5m2@block128-sr", "fp8-e5m2-sr"),
        (
            "nvfp4-sr",
            "float4_e2m1fn@block16:scale=float8_e4m3fn,state_scale=float32-sr",
            "nvfp4-sr",
        ),
        ("mxfp4", "float4_e2m1fn@block32:scale=float8_e8m0fnu,mode=floor", "mxfp4"),
        ("int8@row-sr", "int8@row-sr", "int8@row-sr"),
        (
            "fp8@tile32x128:qmax=240,scale=bf16,scale_round=up",
            "float8_e4m3fn@tile32x128:qmax=240,scale=bfloat16,scale_round=up",
            "fp8@tile32x128:qmax=240,scale=bf16,scale_round=up",
        ),
        ("fp16", "float16", "fp16"),
        (" bf16-sr ", "bfloat16-sr", "bf16-sr"),
    ],
)
def test_canonical_and_short_names(text: str, canonical: str, short: str) -> None:
    fmt = parse_format(text)
    assert str(fmt) == canonical and fmt.short == short


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nvpf4", "Did you mean 'nvfp4'"),
        ("FP16", "Did you mean 'fp16'"),
        ("vllm-int8-rw", "Did you mean 'vllm-int8-row'"),
        ("fp16-rz", "unknown rounding 'rz'"),
        ("int8", "needs a block scale: int8@row"),
        ("fp4", "or nvfp4, mxfp4"),
        ("fp4@none", "needs a block scale"),
        ("fp16@row", "takes no scale"),
        ("int8@rows", "Did you mean 'row'"),
        ("int8@tile0x3", "at least 1"),
        ("int8@block0", "at least 1"),
        ("fp8@row:qmax=500", "1 <= qmax <= 448"),
        ("int8@row:qmax=128", "1 <= qmax <= 127"),
        ("fp8@row:qmax=0", "out of range"),
        ("fp8@row:qmax=100", "not a value of float8_e4m3fn"),
        ("int8@row:qmax=1e999999999", "not a number"),
        ("int8@row:qmak=3", "Did you mean 'qmax'"),
        ("int8@row:qmax", "key=value"),
        ("int8@row:qmax=7,qmax=7", "given twice"),
        ("int8@row:", "no option"),
        ("nvfp4@row", "names its scale already"),
        ("int8@row:mode=floor", "goes with scale=e8m0"),
        ("int8@row:scale=e8m0,scale_round=up", "scale_round=up needs"),
        ("int8@row:scale_round=up", "scale_round=up needs"),
        ("mxfp4:mode=flor", "Did you mean 'floor'"),
        ("int8@row:state_scale=fp32", "goes with scale=e4m3"),
        ("nvfp4:state_scale=bf16", "only fp32"),
        ("int8@row:scale=fp31", "Did you mean 'fp32'"),
        ("fp32-sr", "nothing would be rounded"),
        ("fp8:overflow=ieee", "a scaled one saturates"),
        ("fp16:qmax=3", "needs a scale"),
        ("fp16:overflow=clip", "Known: ieee, saturate"),
        ("", "empty"),
    ],
)
def test_errors_say_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_format(text)
    assert isinstance(caught.value, FormatError)
    assert says in str(caught.value)


# Row of the survey: formats it can be written in, state [dv, dk], bits per element in the table.
SURVEY = [
    (1, ["fp32"], (64, 128), "32"),
    (2, ["fp16-sr"], (64, 128), "16"),
    (3, ["fp16-sr"], (64, 128), "16"),
    (4, ["fp16-sr", "bf16-sr"], (128, 128), "16"),
    (5, ["fp16-sr"], (64, 128), "16"),
    (6, ["fp16"], (64, 128), "16"),
    (7, ["fp32"], (64, 128), "32"),
    (8, ["int16@row"], (64, 128), "16.25"),
    (8, ["fp16-sr"], (64, 128), "16"),
    (9, ["int8@row", "int8@row-sr", "fp8@row", "fp8@row-sr"], (64, 128), "8.25"),
    (9, ["int16@row", "int16@row-sr"], (64, 128), "16.25"),
    (10, ["int8@row", "int8@row-sr", "fp8@row-sr"], (64, 128), "8.25"),
    (11, ["int8@row", "fp8@row-sr"], (64, 128), "8.25"),
    (12, ["int8@row", "int8@key"], (128, 128), "8.25"),  # the axis is not stated
    (14, ["int8@key:scale=bf16"], (128, 128), "8.125"),
    (16, ["fp8@tile32x128:qmax=240"], (128, 128), "8.0078125"),
    (17, ["int8@tile32x128"], (128, 128), "8.0078125"),  # the V tile depends on the launch
    (18, ["int8@row-sr"], (128, 128), "8.25"),
    (20, ["fp16"], (128, 128), "16"),
    (21, ["bf16"], (128, 128), "16"),
    (22, ["bf16", "fp16"], (128, 128), "16"),
    (23, ["fp32"], (128, 128), "32"),
    (23, ["fp16", "bf16"], (128, 128), "16"),
    (24, ["int8@row"], (64, 128), "8.25"),
    (25, ["int8@row", "int4@row"], (128, 128), None),  # neither bits nor axis are stated
    (26, ["int8@row", "int8@state"], (128, 128), None),  # "q8"
    (27, ["fp16"], (64, 128), "16"),
    (31, ["fp32"], (64, 128), "32"),
]
EXTRA_STATE = {13, 15, 19, 28, 29, 30}  # residuals, a channel map, replay over any base format


@pytest.mark.parametrize(("row", "names", "shape", "bits"), SURVEY)
def test_survey_rows_are_writable_with_their_bits(
    row: int, names: list[str], shape: tuple[int, int], bits: str | None
) -> None:
    for name in names:
        fmt = parse_format(name)
        assert bits is None or fmt.bits_per_element(*shape) == Fraction(bits)


def test_survey_is_covered() -> None:
    assert {row for row, *_ in SURVEY} | EXTRA_STATE == set(range(1, 32))
    for preset in PRESETS.values():
        options = [names for row, names, *_ in SURVEY if row == preset.row]
        options.append(["int16@row", "int16@row-sr", "fp8@row"])  # rows 10 and 11 list three
        assert parse_format(preset.spec) in {parse_format(n) for names in options for n in names}


def test_bits_of_the_studied_formats() -> None:
    bits = {n: parse_format(n).bits_per_element(128, 128) for n in ("fp8", "nvfp4", "mxfp4")}
    assert bits["fp8"] == Fraction(33, 4)
    assert bits["nvfp4"] == Fraction(9, 2) + Fraction(32, 128 * 128)
    assert bits["mxfp4"] == Fraction(17, 4)
    # ragged: 33 x 80 in tiles of 32 x 32 has 2 x 3 scales
    ragged = parse_format("int8@tile32x32").bits_per_element(33, 80)
    assert ragged == 8 + Fraction(6 * 32, 33 * 80)
    with pytest.raises(ValueError, match="at least one row"):
        parse_format("fp8").bits_per_element(0, 128)


def test_names_import_no_torch() -> None:
    code = (
        "import sys, quantlab.formats as f; f.parse_format('nvfp4-sr').short; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
