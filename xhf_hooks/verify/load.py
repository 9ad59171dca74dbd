"""Loads a folder with transformers or peft, runs a forward pass and generates text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.exporters.hf_assets import load_tokenizer
from xhf_hooks.format import strict_json
from xhf_hooks.integrity.findings import OK, PROBLEM, Finding
from xhf_hooks.meta_model.transformers_model import class_named, first_architecture
from xhf_hooks.model.quiet_transformers import quiet

_PROMPT = 'The capital of France is'
#: Overrides the folder's generation_config.json, so that it stays short and deterministic.
_GENERATION = {'max_new_tokens': 8, 'do_sample': False, 'num_beams': 1, 'num_return_sequences': 1}


@dataclass
class LoadReport:
    """The outcome of loading; ``error`` is None if it worked. Times in seconds."""

    class_name: str = ''
    load_secs: float = 0.0
    forward_secs: float = 0.0
    written: str = ''
    error: str | None = None

    def lines(self) -> list[str]:
        """The report as text."""
        if self.error is not None:
            return [Finding(PROBLEM, 'load', f'{self.class_name or "transformers"}: {self.error}').line()]
        times = f'in {self.load_secs:.1f} s, forward {self.forward_secs:.2f} s'
        found = [Finding(OK, 'load', f'{self.class_name} {times}')]
        if self.written:
            found.append(Finding(OK, 'generation', self.written))
        return [finding.line() for finding in found]


def load_and_run(folder: Path, *, trust_remote_code: bool) -> LoadReport:
    """Load it with transformers (an adapter with peft), run one forward pass and a short greedy generation. Offline."""
    report = LoadReport()
    try:
        with quiet():
            _run(folder, trust_remote_code, report)
    except Exception as error:  # a model's own code may raise anything
        report.error = f'{type(error).__name__}: {" ".join(str(error)[:500].split())}'
    return report


def _run(folder: Path, trust_remote_code: bool, report: LoadReport) -> None:
    import torch

    started = time.perf_counter()
    model = _load(folder, trust_remote_code).eval()
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
            answer = model.generate(ids, **_GENERATION)[0].tolist()
        report.written = str(answer) if tokenizer is None else repr(tokenizer.decode(answer))


def _load(folder: Path, trust_remote_code: bool) -> Any:
    import transformers

    if (folder / 'adapter_config.json').is_file():
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM.from_pretrained(
            str(folder), torch_dtype='auto', local_files_only=True, trust_remote_code=trust_remote_code
        )
    name = first_architecture(strict_json.read(folder / 'config.json').get('architectures'))
    kind = class_named(name, str(folder), auto=False)
    return (kind or transformers.AutoModelForCausalLM).from_pretrained(
        str(folder), torch_dtype='auto', local_files_only=True, trust_remote_code=trust_remote_code
    )
