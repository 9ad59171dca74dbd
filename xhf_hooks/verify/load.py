"""Loads a folder with transformers or peft, tells what they miss, runs a forward pass and generates text."""

from __future__ import annotations

import copy
import inspect
import time
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.exporters.base_files import load_tokenizer
from xhf_hooks.exporters.hf_assets import text_config
from xhf_hooks.exporters.rehearsal import Problems, load_adapter_and_tell, load_and_tell
from xhf_hooks.format import strict_json
from xhf_hooks.format.text import some
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
        model, problems = _load_adapter(folder, base, trust_remote_code)
    else:
        model, problems = _load_model(folder, trust_remote_code)
    name, secs = type(model).__name__, time.perf_counter() - started
    for kind, names in problems.items():
        if names:
            report.add(PROBLEM, 'load', f'{name}: {len(names)} {kind}: {some(names)}')
    tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    inputs, error = _run_once(model.eval(), _text(model, tokenizer), name, report)
    if report.problems('load'):
        return
    report.add(OK, 'load', f'{name} in {secs:.1f} s')
    if error is not None:
        report.add(UNCHECKED, 'load', f'{name}: its inputs are not known, so it was not run: {error}')
    elif hasattr(model, 'generate') and model.can_generate():
        answer = model.generate(**inputs, **_GENERATION)[0].tolist()
        report.add(OK, 'generation', str(answer) if tokenizer is None else repr(tokenizer.decode(answer)))


def _run_once(
    model: Any, ids: torch.Tensor, name: str, report: FolderCheck
) -> tuple[dict[str, torch.Tensor], str | None]:
    """One forward pass; returns the inputs for a generation, and why a pass was not possible.

    Raises:
        Exception: It failed with text, for a model that takes nothing else.
    """
    plain = model.get_base_model() if hasattr(model, 'get_base_model') else model
    known = inspect.signature(plain.forward).parameters
    made = {'input_ids': ids, **_images_and_sound(plain)}
    made = {one: tensor for one, tensor in made.items() if one in known}
    is_text = made.keys() == {'input_ids'}
    decoder = {'decoder_input_ids': ids} if getattr(plain.config, 'is_encoder_decoder', False) else {}
    first = {one: made[one] for one in [plain.main_input_name] if one in made}
    error = f'forward takes {plain.main_input_name}'
    for inputs in (first, made) if first != made else (made,):
        if not inputs:
            continue
        try:
            output = model(**inputs, **decoder)
        except Exception as caught:  # a model may need more than is known here, such as images of a certain size
            if is_text:
                raise
            error = f'{type(caught).__name__}: {" ".join(str(caught).split())[:200]}'
            continue
        if not bool(_first_tensor(output).isfinite().all()):
            report.add(PROBLEM, 'load', f'{name}: the forward pass returns infinite or NaN values')
        return inputs, None
    return {}, error


def _text(model: Any, tokenizer: Any | None) -> torch.Tensor:
    rows = min((weight.shape[0] for weight in token_embeddings(model)), default=None)
    if tokenizer is None or rows is None:
        return torch.arange(1, 9)[None] % (rows or 9)
    return tokenizer(_PROMPT, return_tensors='pt').input_ids


def _images_and_sound(model: Any) -> dict[str, torch.Tensor]:
    """Noise of the sizes that the config names."""
    configs = [model.config, *(part for part in vars(model.config).values() if hasattr(part, 'model_type'))]
    fields = {name: value for config in reversed(configs) for name, value in vars(config).items() if value is not None}
    found = {'input_values': torch.rand(1, 16_000)}
    if size := fields.get('image_size'):
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        found['pixel_values'] = torch.rand(1, fields.get('num_channels', 3), height, width)
    if bins := fields.get('num_mel_bins'):
        found['input_features'] = torch.rand(1, bins, 2 * fields.get('max_source_positions', 1500))
    return {name: noise.to(model.dtype) for name, noise in found.items()}


def _first_tensor(output: Any) -> torch.Tensor:
    """The logits, or what else a model returns first."""
    found = output.logits if 'logits' in output else output[0]
    return found if isinstance(found, torch.Tensor) else _first_tensor(found)


def _load_model(folder: Path, trust_remote_code: bool) -> tuple[Any, Problems]:
    import transformers

    name = first_architecture(strict_json.read(folder / 'config.json').get('architectures'))
    kind = class_named(name) or transformers.AutoModelForCausalLM
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
    fitted = copy.deepcopy(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    fit_config(fitted, build(fitted, name, trust_remote_code=trust_remote_code), shapes)
    if config.num_labels != fitted.num_labels:
        config.num_labels = fitted.num_labels
    kind = class_named(name) or transformers.AutoModelForCausalLM
    options = dict(local_files_only=True, trust_remote_code=trust_remote_code)
    whole = kind.from_pretrained(base, config=config, torch_dtype='auto', **options)
    n_tokens = getattr(text_config(fitted), 'vocab_size', None)
    if n_tokens != getattr(text_config(config), 'vocab_size', None):
        whole.resize_token_embeddings(n_tokens)
    model = PeftModel.from_pretrained(whole, str(folder))
    return model, load_adapter_and_tell(model, tensors)
