"""Site of the documentation: `python -m scripts.site CACHE [FOLDER]`, by default in `build/site`.

Sphinx reads the Markdown pages where they are, with docs/site/conf.py, and has an environment of
its own in the cache. A warning fails the build: broken links between pages and to their sections,
unknown lexers, pages that the navigation does not name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from scripts.environment import (
    LOCKS,
    ROOT,
    STAMP,
    dependencies,
    install_locked,
    is_complete,
    key,
    locked,
    run,
)

CONFIGURATION = ROOT / "docs" / "site"
FIRST = """<!doctype html>
<title>ElasticJob</title>
<meta http-equiv="refresh" content="0; url=docs/site/index.html">
<a href="docs/site/index.html">ElasticJob</a>
"""
"""First page: the others keep their paths in the repository."""


def environment(cache: Path) -> Path:
    """Return the environment of the locked documentation packages; create it if missing."""
    lock = LOCKS / "docs.txt"
    wanted = key(lock.read_text(), sys.version)
    made = cache / f"docs-{wanted}"
    with locked(cache / f"docs-{wanted}.lock"):
        if not is_complete(made, wanted):
            print(f"installing the packages of the site into {made}", flush=True)
            shutil.rmtree(made, ignore_errors=True)
            run(sys.executable, "-m", "venv", "--without-pip", made)
            pip = [dependencies(cache) / "bin" / "pip", "--python", made / "bin" / "python"]
            install_locked(pip, lock)
            (made / STAMP).write_text(wanted)
    return made


def build(python: Path, folder: Path) -> int:
    """Build the site into an emptied folder; return Sphinx's exit status, not 0 for a warning."""
    shutil.rmtree(folder, ignore_errors=True)
    command: list[str | Path] = [
        python,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--fresh-env",
        "--quiet",
    ]
    command += ["--conf-dir", CONFIGURATION, "--doctree-dir", folder.with_suffix(".doctrees")]
    done = subprocess.run([*command, ROOT, folder], check=False)
    shutil.rmtree(folder.with_suffix(".doctrees"), ignore_errors=True)
    (folder / "index.html").write_text(FIRST)
    return done.returncode


def main() -> int:
    """Build the site and print the path of its first page."""
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "build" / "site"
    failed = build(environment(Path(sys.argv[1])) / "bin" / "python", folder.resolve())
    if not failed:
        print(folder / "index.html")
    return failed


if __name__ == "__main__":
    sys.exit(main())
