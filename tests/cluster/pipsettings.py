"""Pip settings of this machine for builds inside an image.

The settings name an index, a certificate and folders of wheels. They are mounted for the duration
of the build, never written into an image.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from scripts.golang import output

IN_IMAGE = "/etc/pip.conf"
_CERTIFICATE = "/etc/ssl/certs/elasticjob-build.pem"


def read(listed: str) -> dict[str, str]:
    """Parse the output of `pip config list` into one section; environment settings win."""
    found: dict[str, str] = {}
    for line in listed.splitlines():
        place, _, value = line.partition("=")
        section, _, name = place.rpartition(".")
        if section == ":env:" or (section in {"global", "install"} and name not in found):
            found[name] = str(ast.literal_eval(value))
    return found


def for_image(settings: dict[str, str]) -> tuple[str, dict[Path, str]]:
    """Return a pip.conf and the paths that it names on this machine, with their places in the
    image.

    Paths missing on this machine are left out: pip would warn about them.
    """
    mounts: dict[Path, str] = {}
    kept = dict(settings)
    if certificate := kept.pop("cert", ""):
        mounts[Path(certificate)] = kept["cert"] = _CERTIFICATE
    links = []
    for number, place in enumerate(kept.pop("find-links", "").split()):
        if "://" in place:
            links.append(place)
        elif Path(place).is_dir():
            mounts[Path(place)] = f"/run/links-{number}"
            links.append(mounts[Path(place)])
    if links:
        kept["find-links"] = " ".join(links)
    lines = [f"{name} = {value}" for name, value in sorted(kept.items())]
    return "\n".join(["[global]", *lines, ""]), mounts


def here() -> tuple[str, dict[Path, str]]:
    """Return `for_image` of this machine's settings."""
    return for_image(read(output(sys.executable, "-m", "pip", "config", "list")))
