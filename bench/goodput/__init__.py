"""Share of the undisturbed training that systems complete under a sequence of faults."""
