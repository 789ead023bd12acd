"""Status of a job, its conditions, and the events that report its changes. No I/O."""
