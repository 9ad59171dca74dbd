"""Loads a folder with transformers or peft, tells what they miss, runs a forward pass and generates text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.exporters.tokenizer import load_tokenizer
from xhf_hooks.format import strict_json
from xhf_hooks.format.text import some
from xhf_hooks.integrity.report import OK, PROBLEM, Finding
from xhf_hooks.meta_model.transformers_model import class_named, first_architecture
from xhf_hooks.model import quiet

_PROMPT = 'The capital of France is'
#: Overrides the folder's generation_config.json, so that it stays short and deterministic.
_GENERATION = {'max_new_tokens': 8, 'do_sample': False, 'num_beams': 1, 'num_return_sequences': 1}


@dataclass
class LoadReport:
    """The outcome of loading.

    Attributes:
        load_secs, forward_secs: Times in seconds.
        written: The generated text.
        keys: What the library told of names: ``'missing'``, ``'unexpected'`` and ``'mismatched'``, without empty ones.
        error: Why it failed; None if it worked.
    """

    class_name: str = ''
    load_secs: float = 0.0
    forward_secs: float = 0.0
    written: str = ''
    keys: dict[str, list[str]] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_good(self) -> bool:
        return self.error is None and not self.keys

    def lines(self) -> list[str]:
        """The report as text."""
        found = [
            Finding(PROBLEM, 'load', f'{self.class_name}: {len(names)} {kind} keys: {some(names)}')
            for kind, names in self.keys.items()
        ]
        if self.error is not None:
            found.append(Finding(PROBLEM, 'load', f'{self.class_name or "transformers"}: {self.error}'))
        elif self.is_good:
            times = f'in {self.load_secs:.1f} s, forward {self.forward_secs:.2f} s'
            found.append(Finding(OK, 'load', f'{self.class_name} {times}'))
        if self.written and self.is_good:
            found.append(Finding(OK, 'generation', self.written))
        return [finding.line() for finding in found]


def load_and_run(folder: Path, *, base: str | None, trust_remote_code: bool) -> LoadReport:
    """Load it with transformers (an adapter with peft), run one forward pass and a short greedy generation. Offline.

    Args:
        base: The base model of an adapter; None: the one that adapter_config.json names.
    """
    report = LoadReport()
    try:
        with quiet():
            _run(folder, base, trust_remote_code, report)
    except Exception as error:  # a model's own code may raise anything
        report.error = f'{type(error).__name__}: {" ".join(str(error)[:500].split())}'
    return report


def _run(folder: Path, base: str | None, trust_remote_code: bool, report: LoadReport) -> None:
    import torch

    started = time.perf_counter()
    load = _load_adapter if (folder / 'adapter_config.json').is_file() else _load_model
    model, keys = load(folder, base, trust_remote_code)
    model.eval()
    report.keys = {kind: sorted(map(str, names)) for kind, names in keys.items() if names}
    report.class_name, report.load_secs = type(model).__name__, time.perf_counter() - started
    tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, 9)[None] % rows if tokenizer is None else tokenizer(_PROMPT, return_tensors='pt').input_ids
    started = time.perf_counter()
    with torch.no_grad():
        needs_more = {'decoder_input_ids': ids} if getattr(model.config, 'is_encoder_decoder', False) else {}
        output = model(input_ids=ids, **needs_more)
    report.forward_secs = time.perf_counter() - started
    found = output[0] if 'logits' not in output else output.logits
    if not bool(found.isfinite().all()):
        raise DamagedError('the forward pass returns infinite or NaN values')
    if hasattr(model, 'generate') and model.can_generate():
        with torch.no_grad():
            answer = model.generate(input_ids=ids, **_GENERATION)[0].tolist()
        report.written = str(answer) if tokenizer is None else repr(tokenizer.decode(answer))


def _load_model(folder: Path, base: str | None, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """The model, and the names that transformers reports."""
    import transformers

    name = first_architecture(strict_json.read(folder / 'config.json').get('architectures'))
    model, told = (class_named(name, str(folder), auto=False) or transformers.AutoModelForCausalLM).from_pretrained(
        str(folder),
        torch_dtype='auto',
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported instead
    )
    mismatched = [f'{name} {tuple(found)}, expected {tuple(wanted)}' for name, found, wanted in told['mismatched_keys']]
    return model, {
        'missing': told['missing_keys'],
        'unexpected': told['unexpected_keys'],
        'mismatched': mismatched,
    }


def _load_adapter(folder: Path, base: str | None, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """The adapted model, and the names that peft reports; it refuses other shapes."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, load_peft_weights
    from transformers import AutoModelForCausalLM

    lora = PeftConfig.from_pretrained(str(folder))
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(
            base or lora.base_model_name_or_path,
            torch_dtype='auto',
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        ),
        str(folder),
    )
    wanted, found = get_peft_model_state_dict(model).keys(), load_peft_weights(str(folder), device='cpu').keys()
    return model, {'missing': wanted - found, 'unexpected': found - wanted}
