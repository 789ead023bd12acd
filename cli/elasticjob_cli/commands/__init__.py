"""Commands of `elasticjob`: each parses its options, queries the local cluster, and prints."""
