"""The parts of tools/bench.py: the ways that are measured, their launch, tables and charts."""
