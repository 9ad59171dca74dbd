"""Threads: a background save, pools, the copy that training does not wait for."""
