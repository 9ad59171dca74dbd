"""Exporters and templates for XTuner's own models."""
