"""Soak test: one training job through random faults, each of which must be reported."""
