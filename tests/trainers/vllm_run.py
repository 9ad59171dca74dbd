"""Greedy tokens of vLLM: python vllm_run.py REQUESTS ANSWERS, files of JSON.

One process for all models, since an import of vLLM takes half a minute. A request has a ``folder`` and a list of
``prompts``, which are lists of tokens. It may have an ``adapter``, which is a folder; an ``image``, a file that each
prompt shows; ``reloads``, a folder that `reload_weights` names before the prompts are answered.
"""

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest


def answer(request: dict[str, Any], n_tokens: int) -> list[list[int]]:
    """The tokens that follow each prompt."""
    adapter = request.get('adapter')
    llm = LLM(
        request['folder'],
        dtype='float32',
        enforce_eager=True,  # compiling a model takes longer than all that it answers here
        max_model_len=64,
        max_num_seqs=4,
        enable_lora=adapter is not None,
        limit_mm_per_prompt={'image': 1 if 'image' in request else 0},
    )
    if 'reloads' in request:
        llm.collective_rpc('reload_weights', kwargs={'weights_path': request['reloads']})
        llm.reset_prefix_cache()
    shown = {'multi_modal_data': {'image': Image.open(request['image'])}} if 'image' in request else {}
    found = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt, **shown) for prompt in request['prompts']],
        SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True),
        lora_request=None if adapter is None else LoRARequest('adapter', 1, adapter),
    )
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in found]


if __name__ == '__main__':
    asked = json.loads(Path(sys.argv[1]).read_text())
    answers = {name: answer(request, asked['n_tokens']) for name, request in asked['requests'].items()}
    Path(sys.argv[2]).write_text(json.dumps(answers))
