"""What the agent decides: values in, values out; no I/O, clock or environment."""
