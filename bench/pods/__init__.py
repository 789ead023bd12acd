"""`python -m bench.pods`: how long a gang of pods is away after a fault, on a real cluster."""
