"""Owns what a build inside an image is told of this machine's pip settings.

The settings name an index, a certificate, folders of wheels: whatever this machine needs. They are
mounted for the time of the build, never written into an image.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from scripts.golang import output

IN_IMAGE = "/etc/pip.conf"
_CERTIFICATE = "/etc/ssl/certs/elasticjob-build.pem"


def read(listed: str) -> dict[str, str]:
    """The settings that `pip config list` printed, as one section; the environment's go first."""
    found: dict[str, str] = {}
    for line in listed.splitlines():
        place, _, value = line.partition("=")
        section, _, name = place.rpartition(".")
        if section == ":env:" or (section in {"global", "install"} and name not in found):
            found[name] = str(ast.literal_eval(value))
    return found


def for_image(settings: dict[str, str]) -> tuple[str, dict[Path, str]]:
    """The text of a pip.conf, and the files and folders it speaks of, by their place in the image.

    What is not on this machine is left out: pip would complain of it.
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
    """`for_image` of the settings that hold on this machine."""
    return for_image(read(output(sys.executable, "-m", "pip", "config", "list")))
