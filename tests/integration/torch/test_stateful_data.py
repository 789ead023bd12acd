"""`ElasticLoader` with torchdata's StatefulDataLoader: the state of a data set in its workers."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from tests.corpus.environments import cache, environment
from tests.paths import ROOT

PROGRAM = """
import json, sys
from elasticjob.train.snapshots.state.codec import decode, encode
from elasticjob.train.snapshots.memory.part_files import Body
from elasticjob.train.data import ElasticLoader

class Reader:
    '''Data set whose items depend on the number of those read before in the same process.'''
    reads = 0
    def __len__(self):
        return 40
    def __getitem__(self, index):
        self.reads += 1
        return index * 1000 + self.reads
    def state_dict(self):
        return {"reads": self.reads}
    def load_state_dict(self, state):
        self.reads = state["reads"]

def loader(workers, rank=0, world=1):
    return ElasticLoader(
        Reader(), global_batch=4, rank=rank, world=world, seed=2, num_workers=workers
    )

def run(workers, restart_at):
    made, seen = loader(workers), []
    for batch in made:
        seen.append(batch.tolist())
        if len(seen) == restart_at:
            break
    else:
        return seen
    body = encode([made.state_dict(), made.rank_state_dict()])
    whole = bytearray(b"".join(body.views))
    state, own = decode(Body(body.head_bytes, [memoryview(whole)]))
    again = loader(workers)
    again.load_state_dict(state, own)
    return seen + [batch.tolist() for batch in again]

def resized(workers, sizes):
    '''Train three steps with each number of ranks; return the items of each step, over all.'''
    state, own, seen, firsts = None, [], [], []
    for world in sizes:
        gang = [loader(workers, rank, world) for rank in range(world)]
        for rank, made in enumerate(gang):
            if state is not None:  # as restored: own states only at the same number of ranks
                made.load_state_dict(state, own[rank] if len(own) == world else None)
        steps = []
        for number, shares in enumerate(zip(*gang)):
            steps.append([item for share in shares for item in share.tolist()])
            if number == 2:
                break
        state, own = gang[0].state_dict(), [made.rank_state_dict() for made in gang]
        assert all(made.state_dict() == state for made in gang)
        firsts.append([item % 1000 for item in steps[0]])
        seen += [sorted(item // 1000 for item in step) for step in steps]
    return {"steps": seen, "firsts": firsts}

if len(sys.argv) > 1:
    print(json.dumps({workers: resized(workers, (2, 2, 4, 1)) for workers in (0, 2)}))
    sys.exit()
runs = {f"{workers} {at}": run(workers, at) for workers in (0, 2) for at in (0, 1, 3, 9)}
print(json.dumps(runs))
"""


def run(*arguments: str) -> Any:
    python = environment(cache(), "peers") / "bin" / "python"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "sdk"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [python, "-W", "ignore", "-c", PROGRAM, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_state_of_the_data_set_is_kept_by_its_worker_processes() -> None:
    found = run()
    for workers in (0, 2):
        undisturbed = found[f"{workers} 0"]
        assert sorted(each // 1000 for batch in undisturbed for each in batch) == list(range(40))
        for at in (1, 3, 9):
            assert found[f"{workers} {at}"] == undisturbed, (workers, at)


def test_position_is_kept_over_size_changes_and_the_state_at_the_same_size() -> None:
    """Another number of ranks starts the data set afresh at the position; no sample repeats."""
    for workers, found in run("resized").items():
        steps = found["steps"]
        assert [len(step) for step in steps] == [4] * 10, workers  # the last size had one step left
        assert sorted(index for step in steps for index in step) == list(range(40)), workers
        first, same, larger, smaller = found["firsts"]
        assert (first, larger) == ([1, 2, 1, 2], [1, 1, 1, 1]), workers
        assert min(same) > 2, workers  # each rank had read three steps of two samples
        assert smaller == [1, 2, 3, 4], workers
