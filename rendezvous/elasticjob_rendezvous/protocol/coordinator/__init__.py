"""Decisions of the coordinator, the member that writes the rounds. No I/O."""
