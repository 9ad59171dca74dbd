"""Loads a folder with transformers or peft, tells what they miss, runs it on text and generates text."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.base_files import load_tokenizer
from xhf_hooks.exporters.rehearsal import Problems, load_adapter_and_tell, load_and_tell
from xhf_hooks.format import strict_json
from xhf_hooks.format.text import error_text, some
from xhf_hooks.integrity.check import OK, PROBLEM, UNCHECKED, FolderCheck
from xhf_hooks.meta_model.transformers_model import (
    adapter_config_in,
    build,
    class_for_adapter,
    class_named,
    first_architecture,
    fit_config,
    load_config,
)
from xhf_hooks.model import token_embeddings
from xhf_hooks.system.library_settings import quiet

_PROMPT = 'The capital of France is'
_OTHER_INPUTS = {'pixel_values', 'input_features', 'input_values'}
#: Overrides the folder's generation_config.json, so that it stays short and deterministic.
_GENERATION = {'max_new_tokens': 8, 'do_sample': False, 'num_beams': 1, 'num_return_sequences': 1}


def load_and_run(folder: Path, report: FolderCheck, *, base: str | None, trust_remote_code: bool) -> None:
    """Load it with transformers (an adapter with peft), run it on text, and generate a little. Offline.

    Args:
        report: Gets the findings.
        base: The base model of an adapter; None: the one that adapter_config.json names.
    """
    try:
        with quiet(), torch.no_grad():
            _run(folder, report, base, trust_remote_code)
    except Exception as error:  # a model's own code may raise anything
        report.add(PROBLEM, 'load', error_text(error, 500))


def _run(folder: Path, report: FolderCheck, base: str | None, trust_remote_code: bool) -> None:
    started = time.perf_counter()
    if (folder / 'adapter_config.json').is_file():
        model, problems = _load_adapter(folder, base, trust_remote_code)
    else:
        config = strict_json.read(folder / 'config.json')
        name = first_architecture(config.get('architectures'))
        kind = class_named(name)
        if kind is None and name is not None and (why := _why_not_loaded(config, trust_remote_code)):
            report.add(UNCHECKED, 'load', f'{name} is not a class of transformers{why}')
            return
        model, problems = _load_model(folder, kind, trust_remote_code)
    name, secs = type(model).__name__, time.perf_counter() - started
    for kind, names in problems.items():
        if names:
            report.add(PROBLEM, 'load', f'{name}: {len(names)} {kind}: {some(names)}')
    if report.problems('load'):
        return
    report.add(OK, 'load', f'{name} in {secs:.1f} s')
    plain = model.get_base_model() if hasattr(model, 'get_base_model') else model
    if plain.main_input_name != 'input_ids':
        report.add(UNCHECKED, 'run', f'{name} was not run: it takes {plain.main_input_name}, and no text alone')
        return
    tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    ids = _text(model, tokenizer)
    decoder = {'decoder_input_ids': ids} if getattr(plain.config, 'is_encoder_decoder', False) else {}
    try:
        first = model.eval()(input_ids=ids, **decoder)[0]
    except Exception as error:
        if _OTHER_INPUTS.isdisjoint(inspect.signature(plain.forward).parameters):
            raise
        report.add(UNCHECKED, 'run', f'{name} was not run: it takes more than text ({error_text(error)})')
        return
    if not bool(first.isfinite().all()):
        report.add(PROBLEM, 'run', f'{name}: the forward pass returns infinite or NaN values')
    elif hasattr(model, 'generate') and model.can_generate():
        answer = model.generate(input_ids=ids, **_GENERATION)[0].tolist()
        report.add(OK, 'generation', str(answer) if tokenizer is None else repr(tokenizer.decode(answer)))


def _text(model: Any, tokenizer: Any | None) -> torch.Tensor:
    rows = min((weight.shape[0] for weight in token_embeddings(model)), default=None)
    if tokenizer is None or rows is None:
        return torch.arange(1, 9)[None] % (rows or 9)
    return tokenizer(_PROMPT, return_tensors='pt').input_ids


def _why_not_loaded(config: dict[str, Any], trust_remote_code: bool) -> str | None:
    """Of a model whose class is not one of transformers; None if its code is in the folder and may run."""
    if not config.get('auto_map'):
        return ', and its code is not in the folder: only code that has it can load it'
    return None if trust_remote_code else ', and its code in the folder may not run: add --trust-remote-code'


def _load_model(folder: Path, kind: Any | None, trust_remote_code: bool) -> tuple[Any, Problems]:
    import transformers

    kind = kind or transformers.AutoModelForCausalLM
    return load_and_tell(kind, str(folder), trust_remote_code=trust_remote_code)


def _load_adapter(folder: Path, base: str | None, trust_remote_code: bool) -> tuple[Any, Problems]:
    """With peft, onto the base with as many tokens and labels as the adapter has. peft refuses other shapes."""
    import transformers
    from peft import PeftModel, load_peft_weights

    lora = adapter_config_in(folder)
    base = base or lora.base_model_name_or_path
    config = load_config(str(base), trust_remote_code=trust_remote_code, why='the base model')
    name = class_for_adapter(lora, config)
    tensors = load_peft_weights(str(folder), device='cpu')
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    fit_config(config, build(config, name, trust_remote_code=trust_remote_code), shapes)
    kind = class_named(name) or transformers.AutoModelForCausalLM
    whole, _ = load_and_tell(kind, base, config=config, trust_remote_code=trust_remote_code)
    model = PeftModel.from_pretrained(whole, str(folder))
    return model, load_adapter_and_tell(model, tensors)
