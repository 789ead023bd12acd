"""What a training script may use of ElasticJob: see `elasticjob.train`.

It needs nothing but Python 3.8, and does nothing where no agent started the script.
"""
