"""Work-arounds for old and new versions of other libraries: one module per library.

Each function says which versions it is for, so that it can be deleted when they are no longer supported. What a library
does is asked of the installed one, never concluded from its version number.

For those who read a folder with transformers 4:

- ``older_rope``: RoPE in config.json, in older words. Without it, ``hf_assets.write_config`` only saves the config.
- ``tokenizer_files``: the tokenizer's files, in the base's words. Without it, a tokenizer saves itself
  (``hf_assets.write``, and ``lora`` for adapters).
"""
