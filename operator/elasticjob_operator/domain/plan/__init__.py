"""Plan of a job: size, actions, and the rendezvous parameters to write. No I/O."""
