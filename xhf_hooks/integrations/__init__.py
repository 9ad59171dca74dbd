"""Doors for other training loops than MMEngine's. Each module needs what it is named after; nothing else imports them."""
