"""Loads a folder as its users will, runs it once, and generates text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json
from xhf_hooks.meta_model.transformers_model import class_named, first_architecture, quiet

_PROMPT = 'The capital of France is'
#: What the folder's own generation_config.json may not change: how long it takes.
_GENERATION = {'max_new_tokens': 8, 'do_sample': False, 'num_beams': 1, 'num_return_sequences': 1}


@dataclass
class LoadReport:
    """What came of it; ``error`` is why it failed. Times in seconds."""

    class_name: str = ''
    load_secs: float = 0.0
    forward_secs: float = 0.0
    written: str = ''
    error: str | None = None

    def lines(self) -> list[str]:
        """For people."""
        if self.error is not None:
            return [f'problem    load        {self.class_name or "transformers"}: {self.error}']
        lines = [
            f'ok         load        {self.class_name} in {self.load_secs:.1f} s, forward {self.forward_secs:.2f} s'
        ]
        return [*lines, f'ok         generation  {self.written}'] if self.written else lines


def load_and_run(folder: Path, *, trust_remote_code: bool) -> LoadReport:
    """Build it with transformers (an adapter with peft), one forward pass, a short greedy generation.

    Nothing is looked up on the network.
    """
    report = LoadReport()
    try:
        with quiet():
            _run(folder, trust_remote_code, report)
    except Exception as error:  # whatever a model's own code raises is what the user has to know
        report.error = f'{type(error).__name__}: {" ".join(str(error)[:500].split())}'
    return report


def _run(folder: Path, trust_remote_code: bool, report: LoadReport) -> None:
    import torch

    started = time.perf_counter()
    model = _load(folder, trust_remote_code).eval()
    report.class_name, report.load_secs = type(model).__name__, time.perf_counter() - started
    tokenizer = _tokenizer(folder, trust_remote_code)
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, 9)[None] % rows if tokenizer is None else tokenizer(_PROMPT, return_tensors='pt').input_ids
    started = time.perf_counter()
    with torch.no_grad():
        needs_more = {'decoder_input_ids': ids} if getattr(model.config, 'is_encoder_decoder', False) else {}
        output = model(input_ids=ids, **needs_more)
    report.forward_secs = time.perf_counter() - started
    found = output[0] if 'logits' not in output else output.logits
    if not bool(found.isfinite().all()):
        raise DamagedError('the forward pass gives infinite or NaN values')
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


def _tokenizer(folder: Path, trust_remote_code: bool) -> Any | None:
    import transformers

    if not any((folder / name).is_file() for name in ('tokenizer.json', 'tokenizer_config.json', 'tokenizer.model')):
        return None
    return transformers.AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=trust_remote_code
    )
