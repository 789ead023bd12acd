"""Command `elasticjob version`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from elasticjob_cli.output import show


def version() -> None:
    """Print the version."""
    try:
        show(f"elasticjob {installed('elasticjob')}")
    except PackageNotFoundError:
        show("elasticjob (running from source, not installed)")
