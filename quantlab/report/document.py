"""A report of sections, in Markdown and as one HTML page that opens from disk and loads nothing."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantlab.report.table import Table, markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure.

    Attributes:
        name: of its file.
        text: what it shows, for those who cannot see it.
        svg: the figure.
    """

    name: str
    text: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Part of a report.

    Attributes:
        title: heading.
        command: that made it, if any.
        facts: a line on how it was made, if any.
        tables: in order.
        numeric: whether all columns of the tables but the first hold numbers.
        figures: after the tables.
        files: (name, what it holds) of data beside the report.
    """

    title: str
    command: str = ""
    facts: str = ""
    tables: Sequence[Table] = ()
    numeric: bool = True
    figures: Sequence[Figure] = ()
    files: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A report.

    Attributes:
        introduction: Markdown from the title on: headings, paragraphs, indented commands, `code`.
        sections: in order.
    """

    introduction: str
    sections: Sequence[Section]

    @property
    def title(self) -> str:
        """First heading of the introduction."""
        lines = self.introduction.strip().splitlines()
        return lines[0].lstrip("# ") if lines else ""


def to_markdown(document: Document) -> str:
    """Lay a report out in Markdown; figures are files beside it."""
    parts = [document.introduction.strip()]
    for section in document.sections:
        parts.append(f"## {section.title}")
        parts += [f"    {section.command}"] if section.command else []
        parts += [section.facts] if section.facts else []
        parts += [markdown(table, numeric=section.numeric) for table in section.tables]
        parts += [f"![{figure.text}]({figure.name})" for figure in section.figures]
        parts += [_files(section.files)] if section.files else []
    return "\n\n".join(parts) + "\n"


def _files(files: Sequence[tuple[str, str]]) -> str:
    return "Data: " + ", ".join(f"[{name}]({name}) ({what})" for name, what in files) + "."


def to_html(document: Document) -> str:
    """Lay a report out as one page: figures inline, no script, nothing from elsewhere."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quantlab.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections: list[dict[str, Any]] = [
        {
            "section": section,
            "figures": [
                (figure.text, Markup(_own_ids(figure.svg, f"s{i}f{j}")))
                for j, figure in enumerate(section.figures)
            ],
        }
        for i, section in enumerate(document.sections)
    ]
    return environment.get_template("document.html.j2").render(
        title=document.title,
        introduction=Markup(_prose(document.introduction)),
        sections=sections,
    )


def _own_ids(svg: str, prefix: str) -> str:
    """Prefix the ids of a figure: on one page two figures may not share any."""
    for name in sorted(set(re.findall(r'\bid="([^"]+)"', svg)), key=len, reverse=True):
        known = re.escape(name)
        svg = re.sub(rf'\bid="{known}"', f'id="{prefix}-{name}"', svg)
        svg = re.sub(rf"#{known}(?=[\"')])", f"#{prefix}-{name}", svg)
    return svg


def _prose(text: str) -> str:
    """Render headings, paragraphs, indented commands and `code`; all else is escaped."""
    parts = []
    for block in re.split(r"\n\s*\n", text.strip()):
        heading = re.match(r"(#{1,3}) (.*)", block)
        if heading:
            level = len(heading[1])
            parts.append(f"<h{level}>{_inline(heading[2])}</h{level}>")
            block = block[heading.end() :].strip("\n")
            if not block.strip():
                continue
        if all(line.startswith("    ") for line in block.splitlines()):
            code = "\n".join(line[4:] for line in block.splitlines())
            parts.append(f"<pre>{html.escape(code)}</pre>")
        else:
            parts.append(f"<p>{_inline(block)}</p>")
    return "\n".join(parts)


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
