"""Frontends for trainers other than MMEngine, and for a loop of your own. The others need the package in their name."""
