"""Display of a job in a notebook: the table of `get`, its nodes and its explanation, as HTML.

IPython is loaded only for a live display; no part of it is a dependency.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from elasticjob_cli.commands.tables import header, row
from elasticjob_cli.errors import BadInput
from elasticjob_operator import model
from elasticjob_rendezvous.protocol.text import one_line

_MEMBERS = ("POD", "STATE", "ROUND", "STEP", "CHECKPOINT")


def as_html(job: model.ElasticJob, sentences: Iterable[str] = ()) -> str:
    """Return a job as HTML; the text in it is escaped.

    Args:
        sentences: explanation of its state.
    """
    document = job.manifest()
    parts = [_table(header(False), [row(document, False, datetime.now(UTC))])]
    if members := job.status.members:
        rows = [
            (
                member.pod,
                member.state,
                str(member.round),
                _number(member.step),
                _number(member.checkpoint_step),
            )
            for member in members
        ]
        parts.append(_table(_MEMBERS, rows))
    parts += [f"<p>{_text(sentence)}</p>" for sentence in sentences]
    return f"<div>{''.join(parts)}</div>"


def error_html(message: str) -> str:
    """Return an error as HTML."""
    return f"<p>{_text(message)}</p>"


class LiveDisplay:
    """Cell output that shows one job and is replaced at each change. Raises `BadInput`."""

    def __init__(self) -> None:
        try:
            self._ipython: Any = import_module("IPython.display")
        except ModuleNotFoundError as error:
            raise BadInput(
                "display requires IPython, in a notebook; elsewhere use watch() or wait()"
            ) from error
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Show HTML in the place of what was shown before."""
        shown = self._ipython.HTML(text)
        if self._handle is None:
            self._handle = self._ipython.display(shown, display_id=True)
        else:
            self._handle.update(shown)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(title)}</th>" for title in titles)
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>" for cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(text: str) -> str:
    return html.escape(one_line(text))


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
