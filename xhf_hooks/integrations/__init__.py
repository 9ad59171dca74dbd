"""Frontends: for MMEngine and other trainers, each of which needs its trainer's package, and for a loop of your own."""
