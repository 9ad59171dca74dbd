"""XTuner's models, the chat templates of its runs, and the models of XTuner V1: an extension in this package."""

from xhf_hooks.registry import CHAT_TEMPLATES, EXPORTERS, MODEL_BUILDERS
from xhf_hooks.xtuner.chat_template import tokenizer_for_run
from xhf_hooks.xtuner.llava import LlavaExporter
from xhf_hooks.xtuner.models import build_xtuners
from xhf_hooks.xtuner.reward import RewardExporter
from xhf_hooks.xtuner.sharded_moe import ShardedMoeExporter
from xhf_hooks.xtuner.v1 import XtunerV1Exporter
from xhf_hooks.xtuner.v1_models import build_xtuner_v1

__all__ = ['LlavaExporter', 'RewardExporter', 'ShardedMoeExporter', 'XtunerV1Exporter']

EXPORTERS.own += [XtunerV1Exporter, ShardedMoeExporter, RewardExporter, LlavaExporter]
MODEL_BUILDERS.own += [build_xtuners, build_xtuner_v1]
CHAT_TEMPLATES.own += [tokenizer_for_run]
