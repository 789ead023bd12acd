"""Dead-watch detection: compares the object versions the watches delivered with those of a LIST.

A watch can die silently. The proof is a version that one LIST shows and the watch has still not
delivered by the next.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticjob_operator.kube import Json, Kind


class Delivered:
    """Delivered versions by kind and uid. The watches call `take`, the resync calls `compare`."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}
        self._missing: dict[str, dict[str, int]] = {}
        self._dead: set[str] = set()

    @property
    def dead(self) -> tuple[str, ...]:
        """Kinds whose watch is dead."""
        return tuple(sorted(self._dead))

    def take(self, kind: Kind, metadata: Json, deleted: bool) -> None:
        seen = self._seen.setdefault(kind.plural, {})
        if deleted:
            seen.pop(metadata["uid"], None)
        else:
            seen[metadata["uid"]] = _version(metadata)

    def compare(self, kind: Kind, listed: Iterable[Json]) -> set[str]:
        """Return the uids of objects that the LIST shows in a newer version or no longer shows."""
        seen = self._seen.setdefault(kind.plural, {})
        shown = {raw["metadata"]["uid"]: _version(raw["metadata"]) for raw in listed}
        missing = {uid: version for uid, version in shown.items() if seen.get(uid, -1) < version}
        before = self._missing.get(kind.plural, {})
        # Missing at the last comparison and still not delivered.
        if any(uid in shown and seen.get(uid, -1) < version for uid, version in before.items()):
            self._dead.add(kind.plural)
        else:
            self._dead.discard(kind.plural)
        self._missing[kind.plural] = missing
        ghosts = seen.keys() - shown.keys()
        for uid in ghosts:
            del seen[uid]
        return missing.keys() | ghosts


def _version(metadata: Json) -> int:
    """Return the resourceVersion as a number; API servers on etcd allow comparing them."""
    text = str(metadata.get("resourceVersion") or "")
    return int(text) if text.isascii() and text.isdigit() else 0
