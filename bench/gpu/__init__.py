"""Check of recovery on accelerators: `python -m bench.gpu`."""
