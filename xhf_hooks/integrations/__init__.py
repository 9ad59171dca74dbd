"""Frontends for trainers other than MMEngine. Each module needs the package that it is named after."""
