"""The worker agent: it takes part in the rendezvous and runs this node's workers."""
