"""HTML elements whose text is escaped: the only place that writes markup around foreign text.

A string is text and becomes printable and escaped; only `Markup`, which this module and the
timeline's picture make, is written as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from elasticjob_rendezvous.protocol.text import one_cell, printable


class Markup(str):
    """HTML that is safe to write: made of escaped text and of this program's own elements."""

    __slots__ = ()


VOID = frozenset({"br", "input", "link", "meta"})
"""Elements without content and end tag."""


def tag(name: str, /, *content: str | Markup | None, **attributes: str | bool | None) -> Markup:
    """Return an element.

    Args:
        name: name of the element, this program's own.
        content: text, which is escaped as lines, and elements; None is left out.
        attributes: values, which are escaped; True for one without a value, None and False for
            none. A trailing underscore of a name is dropped, others become hyphens.
    """
    written = ""
    for key, value in attributes.items():
        named = key.rstrip("_").replace("_", "-")
        if value is True:
            written += f" {named}"
        elif isinstance(value, str):
            written += f' {named}="{escape(one_cell(value))}"'
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(content)}</{name}>")


def joined(content: Iterable[str | Markup | None]) -> Markup:
    """Return texts and elements one after another; None is left out."""
    return Markup("".join(_written(part) for part in content if part is not None))


def _written(one: str | Markup) -> str:
    return one if isinstance(one, Markup) else escape(printable(one))


def table(titles: Iterable[str], rows: Iterable[Iterable[str | Markup]], minor: set[str]) -> Markup:
    """Return a table; columns of the titles in `minor` are left out on a narrow screen."""
    names = list(titles)
    kinds = ["minor" if name in minor else None for name in names]
    head = [tag("th", name, class_=kind) for name, kind in zip(names, kinds, strict=True)]
    body = [
        tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(cells, kinds, strict=True)))
        for cells in rows
    ]
    inner = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    return tag("div", inner, class_="scroll")
