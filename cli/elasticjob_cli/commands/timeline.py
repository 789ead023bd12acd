"""Command `elasticjob timeline`: a picture of a job's rounds and recoveries."""

from __future__ import annotations

import shutil
import subprocess
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from elasticjob_cli.commands.options import Name, Place, placed
from elasticjob_cli.commands.tables import Cells
from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.local.job_store import find_job
from elasticjob_cli.output import replace_file, show
from elasticjob_cli.timeline_svg import changes_of, end_of, page, svg
from elasticjob_rendezvous.protocol.text import counted, one_line

CONVERTER = "rsvg-convert"
CONVERSION_SECONDS = 60


class Picture(StrEnum):
    """Formats of a timeline."""

    SVG = "svg"
    HTML = "html"
    PNG = "png"


@placed
def timeline(
    place: Place,
    name: Name,
    output: Annotated[
        Picture, typer.Option("--output", "-o", help="Format; png requires rsvg-convert.")
    ] = Picture.SVG,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="File to write. Default: NAME.FORMAT.", show_default=False
        ),
    ] = None,
) -> None:
    """Draw the rounds of a job: nodes over time, and the cost of each recovery.

    A cluster keeps the latest rounds, this machine all of a run.

    \b
    Examples:
      elasticjob timeline digits
      elasticjob timeline digits -o html -f report.html
      kubectl elasticjob timeline digits -n team-a
    """
    document, rounds = _found(place, name)
    changes = changes_of(rounds if isinstance(rounds, list) else [])
    if not changes:
        raise BadInput(f'job "{name}" has had no round yet: `explain` states the reason')
    job = Cells(document)
    rounds_text = counted(len(changes), "round")
    title = f"{name}: {job.text('status', 'phase')}, {rounds_text}"
    picture = svg(title, changes, end_of(job, time.time()))
    target = Path(f"{name}.{output}") if file is None else file
    match output:
        case Picture.SVG:
            content = picture.encode()
        case Picture.HTML:
            found = job.get(list, "status", "explanation")
            lines = [one_line(str(line)) for line in found] if isinstance(found, list) else []
            content = page(title, picture, lines).encode()
        case Picture.PNG:
            content = _converted(picture)
    replace_file(target, content)
    show(f"wrote {target}")


def _found(place: Place, name: str) -> tuple[dict[str, Any], object]:
    """Return a job and its rounds. Raises `CommandError`."""
    if place.kubectl is not None:
        document = place.kubectl.jobs(name)[0]
        return document, Cells(document).get(list, "status", "rounds")
    folder = find_job(place.namespace, name)
    return folder.object(), folder.rounds()


def _converted(picture: str) -> bytes:
    """Return an SVG as PNG. Raises `CommandError`."""
    program = shutil.which(CONVERTER)
    if program is None:
        raise CommandError(
            f"{CONVERTER} is not installed, which png requires: install it (Debian and Ubuntu: "
            "librsvg2-bin), or use -o svg or -o html"
        )
    try:
        done = subprocess.run(
            [program, "--zoom=2"],
            input=picture.encode(),
            check=True,
            capture_output=True,
            timeout=CONVERSION_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        reason = one_line(error.stderr.decode(errors="replace").strip())
        raise CommandError(f"{CONVERTER} failed: {reason}") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{CONVERTER} did not end within {CONVERSION_SECONDS} s") from error
    return done.stdout
