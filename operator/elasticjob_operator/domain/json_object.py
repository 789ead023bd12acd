"""JSON objects: their type, the merge patch between two of them (RFC 7386), and lost fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]


def merge_patch(before: Json, after: Json) -> Json:
    """Return the patch that turns `before` into `after`; empty if they are equal.

    null deletes a field; a list is replaced as a whole.
    """
    patch: Json = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            if changed := merge_patch(old, value):
                patch[key] = changed
        elif key not in before or old != value:
            patch[key] = value
    return patch


def dropped_fields(patch: Json, stored: Json, prefix: str = "") -> Iterator[str]:
    """Yield the paths of fields that a patch sets and that are not stored, such as
    `rounds[].cause`.

    Lists of different lengths are not compared.
    """
    for key, value in patch.items():
        path = f"{prefix}{key}"
        if value is None:
            continue  # deletes the field
        if key not in stored:
            yield path
        else:
            yield from _dropped_below(value, stored[key], path)


def _dropped_below(sent: Any, stored: Any, path: str) -> Iterator[str]:
    if isinstance(sent, dict) and isinstance(stored, dict):
        yield from dropped_fields(sent, stored, f"{path}.")
    elif isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        for one, other in zip(sent, stored, strict=True):
            yield from _dropped_below(one, other, f"{path}[]")


def is_part(stored: Any, whole: Any) -> bool:
    """Return True if `stored` is `whole` or lacks only fields of it; lists are equally long."""
    if isinstance(stored, dict) and isinstance(whole, dict):
        return stored.keys() <= whole.keys() and all(
            is_part(value, whole[key]) for key, value in stored.items()
        )
    if isinstance(stored, list) and isinstance(whole, list) and len(stored) == len(whole):
        return all(is_part(one, other) for one, other in zip(stored, whole, strict=True))
    return bool(stored == whole)
