"""XTuner's own models and templates."""
