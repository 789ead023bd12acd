"""Sources of the jobs' rendezvous: etcds with their informer caches, and agents."""
