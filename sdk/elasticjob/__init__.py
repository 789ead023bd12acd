"""API for training scripts: see `elasticjob.train`.

Requires only Python 3.8, and has no effect unless an ElasticJob agent started the script.
"""
