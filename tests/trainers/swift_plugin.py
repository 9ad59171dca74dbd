"""The callback for ms-swift's ``--external_plugins``."""

from swift.callbacks import callbacks_map

from xhf_hooks.integrations.transformers import HFCheckpointCallback

callbacks_map['hf_checkpoint'] = lambda args, trainer: HFCheckpointCallback(
    save_strategy='steps', save_steps=2, save_total_limit=2
)
