"""Python environments of the corpus: the builds that they install."""

from __future__ import annotations

from scripts.environment import LOCKS
from scripts.lock import other_hashes, read
from tests.corpus.environments import cuda_torch


def test_cuda_build_of_torch_has_the_locked_version_and_no_other_builds_hash() -> None:
    locked, other = read(LOCKS / "dev.txt")["torch"], other_hashes()["torch"].hashes
    found = cuda_torch()
    assert (found.version, found.marker) == (locked.version, locked.marker)
    assert found.hashes
    assert not found.hashes & other
    assert found.hashes | other == locked.hashes
