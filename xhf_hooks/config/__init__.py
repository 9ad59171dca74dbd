"""Defines every option once: name, type, default, meaning, check, and the frontends that have it."""
