"""Puts bytes into the staging folder, and adds up what was written."""
