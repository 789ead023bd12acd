"""Which version of which object the watches have delivered, compared with what a LIST shows.

A watch can die without a word. What two LISTs in a row show and the watch did not bring in all the
time between is the proof.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticjob_operator.kube import Json, Kind


class Delivered:
    """What came, by kind and uid. `take` is told by the watches, `compare` by the sweep."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}
        self._missing: dict[str, dict[str, int]] = {}
        self._dead: set[str] = set()

    @property
    def dead(self) -> tuple[str, ...]:
        """The kinds whose watch is dead."""
        return tuple(sorted(self._dead))

    def take(self, kind: Kind, metadata: Json, deleted: bool) -> None:
        seen = self._seen.setdefault(kind.plural, {})
        if deleted:
            seen.pop(metadata["uid"], None)
        else:
            seen[metadata["uid"]] = _version(metadata)

    def compare(self, kind: Kind, listed: Iterable[Json]) -> set[str]:
        """The uids of objects of which the LIST shows more than the watch, or no longer shows."""
        seen = self._seen.setdefault(kind.plural, {})
        shown = {raw["metadata"]["uid"]: _version(raw["metadata"]) for raw in listed}
        missing = {uid: version for uid, version in shown.items() if seen.get(uid, -1) < version}
        before = self._missing.get(kind.plural, {})
        # What was missing at the last comparison has not come since.
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
    """resourceVersions are compared as numbers, which API servers on etcd let one do."""
    text = str(metadata.get("resourceVersion") or "")
    return int(text) if text.isascii() and text.isdigit() else 0
