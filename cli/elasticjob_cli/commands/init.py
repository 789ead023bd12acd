"""Command `elasticjob init`: a commented manifest for a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from elasticjob_cli.commands.script_job import (
    Nodes,
    Target,
    command_of,
    is_script,
    job_document,
    job_name,
    parse_nodes,
    validated,
)
from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.local.container import nested_launch
from elasticjob_cli.output import show, show_text
from elasticjob_cli.settings import container_environment
from elasticjob_cli.usage_errors import TargetCommand
from elasticjob_launcher.programs.program_check import trains_besides
from elasticjob_operator.model import ElasticJob, Launch
from elasticjob_rendezvous.protocol.text import echoed, one_line

COMMAND_CLASS = TargetCommand

TEMPLATE = """\
# ElasticJob of {script}. Check it with `elasticjob validate FILE`, run it on this machine with
# `elasticjob run FILE`, on a cluster with `kubectl apply -f FILE`.
# All fields: `kubectl explain elasticjob.spec --recursive`.
apiVersion: elasticjob.dev/v1alpha1
kind: ElasticJob
metadata:
  name: {name}
spec:
  minNodes: {least}                      # trains while at least this many nodes are there
  maxNodes: {most}                      # and on at most this many
  # nodes: {most}                       # wanted number, which `scale` changes; default: maxNodes
  # nprocPerNode: 1                # workers of a node; default: one for each accelerator, or 1
{launch}  maxRestarts: 3                   # failures before the job fails; lost nodes do not count
  # recovery:
  #   hangTimeoutSeconds: 1800     # restart if no step is reported for so long
  # runPolicy:
  #   activeDeadlineSeconds: 86400 # stop after a day
  #   ttlSecondsAfterFinished: 3600  # delete the finished job after an hour
  template:
    spec:
      containers:
        - name: trainer
          image: {image}  # has the script; a local run ignores it
          command: {command}
          # workingDir: /workspace
          # env:
          #   - {{name: NCCL_DEBUG, value: WARN}}
          # resources:
          #   limits:
          #     nvidia.com/gpu: 1
          # volumeMounts:
          #   - {{name: checkpoints, mountPath: /checkpoints}}
      # volumes:                   # checkpoints must outlive a pod to survive on a cluster
      #   - name: checkpoints
      #     persistentVolumeClaim: {{claimName: checkpoints}}
"""
PER_NODE = "  launch: PerNode                  # once for each pod: {place} starts {launcher}\n"
REQUESTED = {
    Launch.AUTO: "  launch: Auto                     # decided by the command\n",
    Launch.PER_WORKER: "  launch: PerWorker                # once for each worker\n",
    Launch.PER_NODE: "  launch: PerNode                  # once for each pod; starts the workers\n",
}
IMAGE = "registry.example.com/trainer:1"


def _nodes(text: str) -> Nodes:
    try:
        return parse_nodes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _launch(job: ElasticJob) -> str:
    """Return the line for a script that starts a launcher itself; empty for others, and for
    launchers that do not reach other nodes or may not be all, which `validate` reports."""
    found = nested_launch(job, Path.cwd(), container_environment(None))
    several = job.spec.max_nodes > 1
    if found is None or (several and not found.launcher.joins) or trains_besides(found, several):
        return ""
    return PER_NODE.format(place=one_line(found.place), launcher=found.launcher.name)


def _remedy(words: list[str]) -> str:
    """Return the remedy for a first word that is not a script; empty if there is none."""
    if words[0].endswith((".yaml", ".yml")):
        return ": `elasticjob run FILE` runs a manifest, `elasticjob validate FILE` checks it"
    script = next((word for word in words if is_script(word)), None)
    return "" if script is None else f"; did you mean `elasticjob init {one_line(script)}`?"


def init(
    words: Annotated[
        list[str],
        typer.Argument(
            help="Training script and its arguments.", metavar="SCRIPT [ARG]", show_default=False
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False,
            help="New file, or - for standard output. Default: the script's name with .yaml.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the job instead of the script's.", show_default=False),
    ] = None,
    nodes: Annotated[
        Nodes,
        typer.Option("--nodes", parser=_nodes, metavar="N|MIN:MAX", help="Number of nodes."),
    ] = "1:4",  # type: ignore[assignment]
    image: Annotated[str, typer.Option("--image", help="Image with the script.")] = IMAGE,
    launch: Annotated[
        Launch | None,
        typer.Option(
            "--launch", show_default=False,
            help="Run the script once for each worker or once for each pod. Default: as the script "
            "requires.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Write a commented manifest for a script. An existing file is never replaced.

    Options of `init` may follow the script; from the first other word, and after --, all words are
    the script's.

    \b
    Examples:
      elasticjob init train.py
      elasticjob init train.py --nodes 2:8 --image registry.example.com/me/train:3 --epochs 10
    """
    if not is_script(words[0]):
        raise BadInput(
            "init takes a Python script or a folder with __main__.py, not "
            f"{echoed(words[0])}{_remedy(words)}"
        )
    if not image.strip():
        raise BadInput(f"--image must be the name of an image, such as {IMAGE}")
    command = command_of(Target.SCRIPT, words)
    document = job_document(name or job_name(Target.SCRIPT, words), command, nodes, None)
    container = document["spec"]["template"]["spec"]["containers"][0]
    container["image"] = image
    job = validated(document)
    text = TEMPLATE.format(
        script=echoed(words[0]).strip("'\""),
        launch=_launch(job) if launch is None else REQUESTED[launch],
        name=job.metadata.name,
        least=nodes.least,
        most=nodes.most,
        image=json.dumps(image),
        command=json.dumps(container["command"]),
    )
    if output == "-":
        show_text(text)
        return
    path = Path(output or f"{job.metadata.name}.yaml")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise BadInput(f"{path} exists and was not changed: choose another with -o") from None
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
    show(f"{path} written: edit it, then `elasticjob run {path}` or `kubectl apply -f {path}`")
