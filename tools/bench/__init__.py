"""What tools/bench.py is made of: the ways that are measured, how they are launched, tables and charts."""
