"""Is a model folder whole and unchanged, and do two places hold the same model?"""
