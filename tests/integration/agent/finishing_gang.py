"""Gangs whose workers end one by one, each on request by a file for its rank."""

from __future__ import annotations

from tests.integration.agent_rig import Gang

EACH = """
import json, os, pathlib, sys, time
folder, rank, number = pathlib.Path(sys.argv[1]), os.environ["RANK"], os.environ["ELASTICJOB_ROUND"]
(folder / f".started-{number}-{rank}").write_text(json.dumps({"pid": os.getpid(), **os.environ}))
(folder / f".started-{number}-{rank}").rename(folder / f"started-{number}-{rank}")
while not (folder / f"finish-{rank}").exists():
    time.sleep(0.02)
"""


def finish(gang: Gang, rank: int) -> None:
    (gang.folder / f"finish-{rank}").touch()


def rounds(gang: Gang) -> set[str]:
    return {path.name.split("-")[1] for path in gang.folder.glob("started-*")}
