"""File formats and dtypes: safetensors, JSON, checksums."""
