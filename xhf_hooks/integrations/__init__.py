"""Frontends for other trainers than MMEngine. Each module needs the package that it is named after."""
