"""The command line: `elasticjob`, also `kubectl elasticjob`."""
