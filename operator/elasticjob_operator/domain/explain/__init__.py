"""Explanation of a job in sentences, and the phrases of events and status. No I/O."""
