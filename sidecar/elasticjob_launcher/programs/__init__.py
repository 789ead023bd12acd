"""Static analysis of Python programs that may start a launcher themselves. They are not run."""
