"""Every option once: its name, type, default, meaning and check, and which frontends have it."""
