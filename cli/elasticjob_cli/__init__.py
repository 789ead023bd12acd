"""Command-line interface: `elasticjob`, also installed as `kubectl elasticjob`."""
