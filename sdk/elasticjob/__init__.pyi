"""Names of the package for type checkers; `__init__.py` loads them when they are first used."""

from elasticjob_cli.client import Client as Client
from elasticjob_cli.client import ElasticJob as ElasticJob
