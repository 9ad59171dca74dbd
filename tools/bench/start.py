"""What is planned and checked before training, of large models on the meta device: one process for each, no weights.

`python tools/bench/start.py NAME` prints the figures of one model as JSON.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from argparse import Namespace
from typing import Any
from unittest.mock import patch

from bench.launch import ROOT, environment, in_turns, tell_on_stderr

#: Name of a row to the class of its config, and what differs from the defaults.
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    'Llama 3, 8 B': ('LlamaConfig', dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)),
    'Llama 3, 70 B': ('LlamaConfig', dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80)),
    'Qwen3-MoE, 235 B': (
        'Qwen3MoeConfig',
        dict(hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, head_dim=128, moe_intermediate_size=1536),
    ),
    'DeepSeek-V3, 671 B': ('DeepseekV3Config', {}),
}


def measure(args: Namespace) -> dict[str, Any]:
    """Measure each model in turns."""

    def one(name: str) -> dict[str, float]:
        command = [sys.executable, __file__, name]
        output = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
        if output.returncode:
            sys.exit(f'{" ".join(command)} failed:\n{output.stderr[-3000:]}')
        return json.loads(output.stdout.splitlines()[-1])

    return {'runs': in_turns(list(MODELS), args.repeats, one, tell_on_stderr)}


def measure_model(name: str) -> dict[str, float]:
    """Seconds and CPU seconds of what the hook does between the imports and the first step, without the folder."""
    began = time.perf_counter()
    import torch
    import transformers

    from xhf_hooks.exporters.huggingface import HuggingFaceExporter
    from xhf_hooks.options import SaveOptions
    from xhf_hooks.planning.write_strategy import WriteStrategy
    from xhf_hooks.ranks.collective import Collective
    from xhf_hooks.runs.save_context import SaveContext
    from xhf_hooks.runs.telemetry import RunLog
    from xhf_hooks.runs.unwrap import unwrap

    kind, fields = MODELS[name]
    config = getattr(transformers, kind)(**fields)
    with torch.device('meta'):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    built = time.perf_counter()
    loading: list[float] = []
    check_loading = HuggingFaceExporter.check_loading

    def timed(*given: Any) -> Any:
        cpu = time.process_time()
        try:
            return check_loading(*given)
        finally:
            loading.append(time.process_time() - cpu)

    cpu = time.process_time()
    log = RunLog(logging.getLogger('bench'), 'start')
    # Without values: no tensor is read before the first save
    with (
        patch('xhf_hooks.runs.preparation._require_values'),
        patch.object(HuggingFaceExporter, 'check_loading', timed),
    ):
        context = SaveContext.open(
            unwrap(model), SaveOptions(), Collective.connect(), log, [].append, strategy=WriteStrategy.POSITIONAL
        )
    return {
        'tensors': len(context.plan.placements),
        'imports_and_model_secs': built - began,
        'seconds': time.perf_counter() - built,
        'cpu_secs': time.process_time() - cpu,
        'loading_cpu_secs': sum(loading),
    }


if __name__ == '__main__':
    print(json.dumps(measure_model(sys.argv[1])))
