"""ElasticJob's images in the cluster: operator, sidecar, trainers and the example on top of them.

`build` makes their archives, `load` puts them into every node. A node records the images it
received, so that only changed ones are loaded again.
"""

from __future__ import annotations

import os
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scripts.environment import locked
from tests.cluster import builder, sources, trainer
from tests.cluster.builder import Recipe
from tests.cluster.cluster import Cluster
from tests.cluster.engine import Engine
from tests.cluster.places import ARCHIVES, CACHE, NODE_ARCHIVES, ROOT

BASE = "BASE_IMAGE"
"""Environment variable that replaces the Dockerfiles' base image, for instance by its digest."""
EXAMPLE = "elasticjob/digits:dev"
"""Image name used by examples/digits/elasticjob.yaml."""
_NOTES = "/kind/loaded"  # in a node: the mark loaded last, by image
_CTR = "ctr --namespace k8s.io images"
_LOCK = CACHE / "cluster-images.lock"


@dataclass(frozen=True, slots=True)
class Images:
    """Names of the images, as a chart or a pod uses them."""

    operator: str
    sidecar: str
    trainer: str


def _recipes() -> dict[str, Recipe]:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    ours = {
        name: Recipe(f"ghcr.io/elasticjob/{name}:{version}", ROOT / f"Dockerfile.{name}")
        for name in ("operator", "sidecar")
    }
    return {**ours, "trainer": trainer.recipe()}


def names() -> Images:
    """Return the names of the images."""
    return Images(**{name: recipe.name for name, recipe in _recipes().items()})


def build(engine: Engine | None) -> None:
    """Bring the archives of all images up to date: with this engine, or without a registry."""
    ARCHIVES.mkdir(parents=True, exist_ok=True)
    recipes = _recipes()
    with locked(_LOCK):
        with ThreadPoolExecutor(len(recipes)) as lanes:
            built = list(lanes.map(lambda name: _build(engine, name, recipes[name]), recipes))
        if engine is None and any(built):
            builder.forget_old(recipes["trainer"])


def _build(engine: Engine | None, name: str, recipe: Recipe) -> bool:
    """Bring an archive up to date; return False if it was."""
    archive, note = ARCHIVES / f"{name}.tar", ARCHIVES / f"{name}.source"
    base = os.environ.get(BASE, "")
    source = sources.key_of(recipe) + ("" if engine is None else f"{engine.docker}{base}")
    if archive.exists() and note.exists() and note.read_text() == source:
        return False
    if engine is None and base:
        raise ValueError(f"{BASE}={base} needs a Docker engine that reaches a registry")
    if engine is not None:
        made = _build_with_docker(engine, recipe)
        if made != _id(name):
            engine.run("save", "--output", archive, recipe.name, timeout=300)
    elif name == "trainer":
        made = recipe.name
        archive.unlink(missing_ok=True)
        archive.hardlink_to(trainer.image())
    else:
        made = builder.build(recipe)
        if made != _id(name):
            builder.save(recipe, made, archive)
    (ARCHIVES / f"{name}.id").write_text(made)
    note.write_text(source)
    return True


def _id(name: str) -> str:
    """Return the id of the image in the archive, empty if there is none."""
    note = ARCHIVES / f"{name}.id"
    return note.read_text() if note.exists() else ""


def _build_with_docker(engine: Engine, recipe: Recipe) -> str:
    contexts = [f"{name}={builder.folder(path)}" for name, path in recipe.contexts.items()]
    base = os.environ.get(BASE, "")
    return engine.run(
        *("build", "--quiet", "--tag", recipe.name, "--file", recipe.dockerfile),
        *([f"--build-arg=BASE={base}"] if base else []),
        *(f"--build-context={context}" for context in contexts),
        ROOT,
        timeout=1200,
    ).strip()


def load(cluster: Cluster) -> Images:
    """Load outdated or missing images into every node of the cluster; return the images' names."""
    with locked(_LOCK), ThreadPoolExecutor(len(cluster.nodes)) as lanes:
        list(lanes.map(lambda node: _load_into(cluster, node), cluster.nodes))
    return names()


def _load_into(cluster: Cluster, node: str) -> None:
    there = cluster.exec_on_node(node, "sh", "-c", f"{_CTR} ls --quiet; cat {_NOTES}/* || true")
    known = set(there.split())
    for name, recipe in _recipes().items():
        # The trainers' tag identifies its contents; the others' tag is the version.
        mark = f"docker.io/{recipe.name}" if name == "trainer" else f"{name}={_id(name)}"
        if mark not in known:
            note = f"mkdir -p {_NOTES} && echo '{mark}' > {_NOTES}/{name}"
            script = f"{_CTR} import {NODE_ARCHIVES}/{name}.tar && {note}"
            cluster.exec_on_node(node, "sh", "-c", script, timeout=300)
    # The trainers' image contains the example; its manifest uses the name a user would choose.
    tag = f"{_CTR} tag --force docker.io/{names().trainer} docker.io/{EXAMPLE}"
    cluster.exec_on_node(node, "sh", "-c", tag)
