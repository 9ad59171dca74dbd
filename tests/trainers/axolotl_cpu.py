"""A plugin of Axolotl for runs without a GPU: ``plugins: [tests.trainers.axolotl_cpu.OnCPU]``."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin


class OnCPU(BasePlugin):
    """Training arguments that no line of the YAML sets; prints the class of the trained model."""

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        return {'use_cpu': True}

    def post_train(self, cfg: Any, model: Any) -> None:
        print('trained:', type(model).__name__)
