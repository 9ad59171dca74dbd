"""What is done for transformers 4 alone, so that all of it can be deleted in one commit.

For those who read a folder with it:

- ``rope``: RoPE in config.json, in older words. Without it, ``hf_assets.write_config`` only saves the config.
- ``tokenizer``: the tokenizer's files, in the base's words. Without it, a tokenizer saves itself (``hf_assets.write``,
  and ``lora`` for adapters).

For those who train with it:

- ``installed``: the names that it gives weights when it saves (``weight_conversion``), and what its loading does
  otherwise (``rehearsal``, ``huggingface``). ``on_meta`` and ``hf_assets`` have three lines more for 4.48.
"""
