"""JSON objects: their type, and the merge patch between two of them (RFC 7386)."""

from __future__ import annotations

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
