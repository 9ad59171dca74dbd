"""XTuner's models, the chat templates of its runs, and the models of XTuner V1: an extension in this package."""

from xhf_hooks.exporters.xtuner.chat_template import tokenizer_for_run
from xhf_hooks.exporters.xtuner.llava import LlavaExporter
from xhf_hooks.exporters.xtuner.reward import RewardExporter
from xhf_hooks.exporters.xtuner.sharded_moe import ShardedMoeExporter
from xhf_hooks.exporters.xtuner.v1 import XtunerV1Exporter
from xhf_hooks.registry import CHAT_TEMPLATES, EXPORTERS

__all__ = ['LlavaExporter', 'RewardExporter', 'ShardedMoeExporter', 'XtunerV1Exporter']

EXPORTERS.own += [XtunerV1Exporter, ShardedMoeExporter, RewardExporter, LlavaExporter]
CHAT_TEMPLATES.own += [tokenizer_for_run]
