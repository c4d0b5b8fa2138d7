"""Everything about a GPU in one command: `python -m benchmarks.gpu`."""
