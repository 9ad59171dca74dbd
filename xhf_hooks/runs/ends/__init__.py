"""Work that runs beside training: background saves, uploads, the command after each save; and saves on request."""
