"""Loads a folder with transformers or peft, tells what they miss, runs a forward pass and generates text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.exporters.hf_assets import quiet
from xhf_hooks.exporters.rehearsal import load_and_tell
from xhf_hooks.exporters.tokenizer import load_tokenizer
from xhf_hooks.format import strict_json
from xhf_hooks.format.text import some
from xhf_hooks.integrity.check import OK, PROBLEM, FolderCheck
from xhf_hooks.meta_model.transformers_model import class_named, first_architecture

_PROMPT = 'The capital of France is'
#: Overrides the folder's generation_config.json, so that it stays short and deterministic.
_GENERATION = {'max_new_tokens': 8, 'do_sample': False, 'num_beams': 1, 'num_return_sequences': 1}


def load_and_run(folder: Path, report: FolderCheck, *, base: str | None, trust_remote_code: bool) -> None:
    """Load it with transformers (an adapter with peft), run one forward pass and a short greedy generation. Offline.

    Args:
        report: Gets the findings.
        base: The base model of an adapter; None: the one that adapter_config.json names.
    """
    try:
        with quiet(), torch.no_grad():
            _run(folder, report, base, trust_remote_code)
    except Exception as error:  # a model's own code may raise anything
        report.add(PROBLEM, 'load', f'{type(error).__name__}: {" ".join(str(error)[:500].split())}')


def _run(folder: Path, report: FolderCheck, base: str | None, trust_remote_code: bool) -> None:
    started = time.perf_counter()
    if (folder / 'adapter_config.json').is_file():
        model, keys = _load_adapter(folder, base, trust_remote_code)
    else:
        model, keys = _load_model(folder, trust_remote_code)
    name, secs = type(model).__name__, time.perf_counter() - started
    for kind, names in keys.items():
        if names:
            report.add(PROBLEM, 'load', f'{name}: {len(names)} {kind} keys: {some(sorted(map(str, names)))}')
    tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, 9)[None] % rows if tokenizer is None else tokenizer(_PROMPT, return_tensors='pt').input_ids
    needs_more = {'decoder_input_ids': ids} if getattr(model.config, 'is_encoder_decoder', False) else {}
    output = model.eval()(input_ids=ids, **needs_more)
    if not bool((output[0] if 'logits' not in output else output.logits).isfinite().all()):
        report.add(PROBLEM, 'load', f'{name}: the forward pass returns infinite or NaN values')
    if report.problems('load'):
        return
    report.add(OK, 'load', f'{name} in {secs:.1f} s')
    if hasattr(model, 'generate') and model.can_generate():
        answer = model.generate(input_ids=ids, **_GENERATION)[0].tolist()
        report.add(OK, 'generation', str(answer) if tokenizer is None else repr(tokenizer.decode(answer)))


def _load_model(folder: Path, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """The model, and the names that transformers reports."""
    import transformers

    name = first_architecture(strict_json.read(folder / 'config.json').get('architectures'))
    kind = class_named(name) or transformers.AutoModelForCausalLM
    return load_and_tell(kind, str(folder), trust_remote_code=trust_remote_code)


def _load_adapter(folder: Path, base: str | None, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """The adapted model, and the names that peft reports; it refuses other shapes."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, load_peft_weights
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(
        base or PeftConfig.from_pretrained(str(folder)).base_model_name_or_path,
        torch_dtype='auto',
        local_files_only=True,
        trust_remote_code=trust_remote_code,
    )
    model = PeftModel.from_pretrained(whole, str(folder))
    wanted, found = get_peft_model_state_dict(model).keys(), load_peft_weights(str(folder), device='cpu').keys()
    return model, {'missing': wanted - found, 'unexpected': found - wanted}
