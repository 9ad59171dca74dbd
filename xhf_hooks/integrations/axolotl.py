"""The plugin for Axolotl: ``plugins: [xhf_hooks.integrations.axolotl.HFCheckpointPlugin]``.

Axolotl's interface is that of ``src/axolotl/integrations/base.py`` (``BasePlugin``, ``PluginManager``) and
``src/axolotl/integrations/config.py`` (``merge_input_args``) in axolotl-ai-cloud/axolotl, commits 002a637c and
0fad92a3.
"""

from __future__ import annotations

import logging
from inspect import signature
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, ConfigDict, create_model

from xhf_hooks.integrations.transformers import HFCheckpointCallback

#: The options of HFCheckpointCallback, which checks their values. Unknown names are refused.
HFCheckpointOptions: Any = create_model(  # type: ignore[call-overload]
    'HFCheckpointOptions',
    __config__=ConfigDict(extra='forbid'),
    **{option.name: (Any, option.default) for option in signature(HFCheckpointCallback).parameters.values()},
)


class HFCheckpointArgs(BaseModel):
    """The fields that this plugin adds to Axolotl's YAML: ``hf_checkpoint``, with the options below it."""

    hf_checkpoint: HFCheckpointOptions | None = None


class HFCheckpointPlugin(BasePlugin):
    """Adds HFCheckpointCallback to the Trainer that Axolotl builds."""

    def get_input_args(self) -> str:
        """The class of this plugin's part of the YAML."""
        return 'xhf_hooks.integrations.axolotl.HFCheckpointArgs'

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[HFCheckpointCallback]:
        """Returns the callback. Called after the Trainer is built, before it trains.

        Args:
            cfg: Axolotl's config, a dict that returns None for missing keys.

        Raises:
            OptionError: An option has a bad value.
        """
        given = HFCheckpointOptions.model_validate(dict(cfg.get('hf_checkpoint') or {}))
        callback = HFCheckpointCallback(**given.model_dump())
        # Axolotl's console drops what other loggers say at INFO
        callback.logger = logging.getLogger('axolotl.xhf_hooks')
        return [callback]
