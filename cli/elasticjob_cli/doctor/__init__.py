"""Checks of `elasticjob doctor`: facts are gathered at the edge, findings are pure functions."""
