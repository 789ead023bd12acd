"""Processes of the launcher: start, output, signals and reaping."""
