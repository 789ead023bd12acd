"""Training state of one rank: its encoding, its shards, and its copies beside the training."""
