"""Frontends for other trainers than MMEngine, each of which needs its trainer's package, and for a loop of your own."""
