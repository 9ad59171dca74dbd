"""Safe access to files: regular files only, mappings without SIGBUS, limits."""
