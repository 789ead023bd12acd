"""`ElasticLoader` with torchdata's StatefulDataLoader: the state of a data set in its workers."""

from __future__ import annotations

import json
import os
import subprocess

from tests.corpus.environments import cache, environment
from tests.paths import ROOT

PROGRAM = """
import json
from elasticjob.train.codec import decode, encode
from elasticjob.train.buffers import Body
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

def loader(workers):
    return ElasticLoader(Reader(), global_batch=4, rank=0, world=1, seed=2, num_workers=workers)

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

runs = {f"{workers} {at}": run(workers, at) for workers in (0, 2) for at in (0, 1, 3, 9)}
print(json.dumps(runs))
"""


def test_state_of_the_data_set_is_kept_by_its_worker_processes() -> None:
    python = environment(cache(), "peers") / "bin" / "python"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "sdk"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [python, "-W", "ignore", "-c", PROGRAM],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for workers in (0, 2):
        undisturbed = found[f"{workers} 0"]
        assert sorted(each // 1000 for batch in undisturbed for each in batch) == list(range(40))
        for at in (1, 3, 9):
            assert found[f"{workers} {at}"] == undisturbed, (workers, at)
