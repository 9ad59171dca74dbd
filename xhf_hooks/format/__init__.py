"""File formats and element types: safetensors, JSON, checksums."""
