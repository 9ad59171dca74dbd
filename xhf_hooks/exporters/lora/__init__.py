"""Exports LoRA models as an adapter, merged, or both, and adapters inside larger models."""
