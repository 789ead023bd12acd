"""Recovery time of a gang of pods on a real cluster: `python -m bench.pods`."""
