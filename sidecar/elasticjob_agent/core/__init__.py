"""Decision logic of the agent: values in, values out; no I/O, clock or environment."""
