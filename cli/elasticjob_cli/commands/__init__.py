"""The commands of `elasticjob`: each reads its options, asks the local cluster, and prints."""
