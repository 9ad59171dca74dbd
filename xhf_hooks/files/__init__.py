"""Files of a save: how bytes are written to them, their checksums, the manifest, and the check of a folder."""
