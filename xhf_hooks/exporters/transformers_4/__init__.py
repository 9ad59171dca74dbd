"""What is done for transformers 4 alone, so that all of it can be deleted in one commit.

For those who read a folder with it:

- ``rope``: RoPE in config.json, in older words. Without it, ``hf_assets.write_config`` only saves the config.
- ``tokenizer``: the tokenizer's files, in the base's words. Without it, tokenizers save themselves.

For those who train with it:

- ``installed``: names that it gives weights when it saves, and ties that it makes while it builds a model.
"""
