"""Local cluster: one job on this machine, with processes as pods."""
