"""The page: one file, nothing from outside, every text escaped."""

import re
from html.parser import HTMLParser

import pytest

from quantlab.report.page import write_report
from quantlab.study.result import load_result
from quantlab.study.run import run_kl
from tests.study.fake import FakeBackend, make_spec

HOSTILE = "</script><script>alert(1)</script><!-- '\"& tiny"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "run"
    command = ["quantlab", "kl", "--model", HOSTILE]
    result = run_kl(make_spec(model=HOSTILE), out, backend=FakeBackend(), command=command)
    return result, write_report(result)


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.text = [], []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


def parse(files):
    page = Elements()
    page.feed(files[-1].read_text("utf-8"))
    return page


def test_files(run):
    _, files = run
    assert [f.name for f in files] == ["kl.png", "kl.svg", "tail.png", "tail.svg", "index.html"]
    assert all(f.stat().st_size > 1000 for f in files)
    assert files[-1].stat().st_size <= 2_000_000


def test_page_loads_nothing_from_outside(run):
    page = parse(run[1])
    addresses = [
        v for tag, a in page.found for k, v in a.items() if k in ("src", "href", "xlink:href")
    ]
    assert set(addresses) <= {"rows.parquet", "summary.csv"}
    assert not any(tag in ("link", "iframe", "object", "embed") for tag, _ in page.found)
    scripts = [a for tag, a in page.found if tag == "script"]
    # one bundle, one starter, and one JSON document a figure
    assert [a.get("type") for a in scripts].count("application/json") == 2 and len(scripts) == 4


def test_names_are_escaped(run):
    html = run[1][-1].read_text("utf-8")
    assert "<script>alert(1)" not in html and "<!-- '" not in html
    assert HOSTILE in "".join(parse(run[1]).text)


def test_page_has_table_command_and_provenance(run):
    result, files = run
    text = " ".join("".join(parse(files).text).split())
    for part in (
        "nvfp4 / fp16-sr",
        "quantlab kl --model",
        "float4_e2m1fn@block16",
        result.record["data"]["streams"][0]["tokens_sha256"],
        "byt5",
        "torch",
        "Streams" if result.failed else "streams",
        "div.",
        "stopped being finite",
    ):
        assert part in text


def test_unfinished_run_says_so(tmp_path):
    out = tmp_path / "run"

    def stop(event, t):
        if event == "segment" and t == 320:
            raise KeyboardInterrupt

    with pytest.raises(Exception, match="interrupted"):
        run_kl(make_spec(), out, backend=FakeBackend(stop))
    files = write_report(load_result(out))
    assert re.search(r"not finished \(state: interrupted\)", files[-1].read_text("utf-8"))


def test_nothing_measured_gives_no_figures(run, tmp_path):
    out = tmp_path / "run"

    def stop(event, t):
        raise KeyboardInterrupt

    with pytest.raises(Exception, match="interrupted"):
        run_kl(make_spec(), out, backend=FakeBackend(stop))
    assert write_report(load_result(out)) == []
