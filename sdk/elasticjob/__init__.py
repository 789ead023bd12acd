"""API for training scripts, `elasticjob.train`, and the Python client of jobs.

The package requires only Python 3.8 and has no effect unless an ElasticJob agent started the
script. `Client` and `ElasticJob` are loaded when they are first used, and require the packages of
the command line.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_CLIENT = ("Client", "ElasticJob")


def __getattr__(name: str) -> Any:
    if name not in _CLIENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        client = import_module("elasticjob_cli.client")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"elasticjob.{name} requires the command line's packages, and {error.name} is missing: "
            "pip install elasticjob"
        ) from error
    return getattr(client, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_CLIENT])
