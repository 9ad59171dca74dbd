"""Hostile contents of ``config.json`` and other files of its folder, and a process that tries them on the commands.

Run as a program: ``python -m tests.helpers.hostile_models FOLDER CASES``. It imports what the commands import, then
forks for each case, since the imports take longer than a case.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.model_folder import save_tokenizer
from tests.helpers.zoo import DECODER

#: A case beyond these limits ends with a signal or a MemoryError. They are far above what the test allows, so that
#: the excess is measured.
_CPU_SECS = 60
_MEMORY_NBYTES = 6 * 10**9
#: A tenth of the limit for users: 14 runs are meant to hit it, and the others need a tenth of it.
_TRIAL_CPU_SECS = 1.0

_MANY = 10**7
_LLAMA = {
    'model_type': 'llama',
    'architectures': ['LlamaForCausalLM'],
    **DECODER,
    'tie_word_embeddings': False,
    'torch_dtype': 'float32',
}


def _llama(**changed: Any) -> dict[str, Any]:
    return {**_LLAMA, **changed}


def _model(kind: str, architecture: str, **options: Any) -> dict[str, Any]:
    return {'model_type': kind, 'architectures': [architecture], **options}


def _nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {'text_config': found}
    return found


#: Configs with more modules, labels or numbers than the file has tensors for.
ABSURD: dict[str, dict[str, Any]] = {
    'bart layers': _model('bart', 'BartForConditionalGeneration', encoder_layers=_MANY),
    'swin depths': _model('swin', 'SwinForImageClassification', depths=[2, 2, _MANY, 2]),
    'swin depths of one number': _model('swin', 'SwinForImageClassification', depths=[10**10, 1, 1, 1]),
    'resnet depths': _model('resnet', 'ResNetForImageClassification', depths=[2, _MANY, 2, 2]),
    'llama layers': _llama(num_hidden_layers=_MANY),
    'qwen2 layers': _model('qwen2', 'Qwen2ForCausalLM', num_hidden_layers=10**10),
    'mixtral experts': _model('mixtral', 'MixtralForCausalLM', num_local_experts=_MANY, num_hidden_layers=10**4),
    'a million labels': _llama(id2label={str(i): f'LABEL_{i}' for i in range(10**6)}),
    'number of labels': _llama(num_labels=10**9),
    'a million kinds of layers': _model('qwen2', 'Qwen2ForCausalLM', layer_types=['full_attention'] * 10**6),
    'lists that are multiplied': _model(
        'gpt_neo', 'GPTNeoForCausalLM', attention_types=[[['global'], 10**9]], num_layers=10**9
    ),
    'sines': _model(
        'distilbert', 'DistilBertModel', sinusoidal_pos_embds=True, max_position_embeddings=10**6, dim=10**5
    ),
    'positions': _model('whisper', 'WhisperForConditionalGeneration', max_source_positions=10**12),
    'gpt2 positions': _model('gpt2', 'GPT2LMHeadModel', n_positions=10**10),
    'convolutions': _model('wav2vec2', 'Wav2Vec2Model', conv_dim=[8] * 10**5, num_feat_extract_layers=10**5),
    'vocabulary of 2**70': _llama(vocab_size=2**70),
    'negative size': _llama(hidden_size=-40),
    'no heads': _llama(num_attention_heads=0),
    'nested': _llama(**_nested(900)),
}

#: Values of the wrong JSON type, or names of something else than the field requires.
WRONG: dict[str, dict[str, Any]] = {
    **{f'model_type {value!r}': _llama(model_type=value) for value in (['llama'], 5, {}, None, True)},
    **{
        f'architectures {value!r}': _llama(architectures=value)
        for value in (
            ['pipeline'], ['models'], ['Trainer'], ['LlamaConfig'], ['PreTrainedModel'], ['set_seed'],
            ['AutoModelForCausalLM'], 'LlamaForCausalLM', [5], [['LlamaForCausalLM']], {'a': 1}, 7,
        )
    },
    **{f'hidden_act {value!r}': _llama(hidden_act=value) for value in ('nope', ['silu'], 5, {})},
    **{
        f'rope_scaling {value!r}': _llama(rope_scaling=value)
        for value in ({'rope_type': 'nope', 'factor': 2.0}, 'linear', 5, ['linear'], {'rope_type': {}})
    },
    **{f'auto_map {value!r}': _llama(auto_map=value) for value in (5, 'x.Y', ['x.Y'], {'AutoConfig': 5})},
    **{f'torch_dtype {value!r}': _llama(torch_dtype=value) for value in (5, 'nope', ['float32'])},
    **{f'quantization_config {value!r}': _llama(quantization_config=value) for value in (5, 'x', ['x'])},
    **{f'vocab_size {value!r}': _llama(vocab_size=value) for value in ('131', [131], {}, None, 1.5)},
    'num_hidden_layers a string': _llama(num_hidden_layers='2'),
    'id2label a list': _llama(id2label=['a', 'b']),
    'id2label of no numbers': _llama(id2label={'a': 'b'}),
    'text_config a string': _llama(text_config='x'),
    'eos_token_id a string': _llama(eos_token_id='2'),
    'tie_word_embeddings a list': _llama(tie_word_embeddings=[1]),
}  # fmt: skip

_T5 = {'tokenizer_class': 'T5Tokenizer'}
#: Files beside a good config.json from which transformers builds the tokenizer or the generation config.
BESIDE: dict[str, dict[str, Any]] = {
    'extra ids': {'tokenizer_config.json': {**_T5, 'extra_ids': 10**9}},
    'pegasus offset': {'tokenizer_config.json': {'tokenizer_class': 'PegasusTokenizer', 'offset': 10**9}},
    'bytes with extra ids': {'tokenizer_config.json': {'tokenizer_class': 'ByT5Tokenizer', 'extra_ids': 10**9}},
    'an added token of a huge number': {
        'tokenizer_config.json': {
            'tokenizer_class': 'PreTrainedTokenizerFast',
            'added_tokens_decoder': {str(10**12): {'content': '<x>', 'special': True}},
        }
    },
    'a million added tokens': {
        'tokenizer_config.json': {
            'tokenizer_class': 'PreTrainedTokenizerFast',
            'added_tokens_decoder': {str(131 + i): {'content': f'<x{i}>', 'special': True} for i in range(10**6)},
        }
    },
    'a tokenizer class that is none': {'tokenizer_config.json': {'tokenizer_class': 'pipeline'}},
    'a tokenizer class of a number': {'tokenizer_config.json': {'tokenizer_class': 5}},
    'special tokens of other kinds': {'special_tokens_map.json': {'eos_token': {'content': [1]}, 'pad_token': 7}},
    'tokenizer.json a list': {'tokenizer.json': []},
    'tokenizer.json without a model': {'tokenizer.json': {'version': '1.0', 'model': {'type': 'BPE', 'vocab': 5}}},
    'generation ids of other kinds': {'generation_config.json': {'eos_token_id': {'a': 1}}},
    'generation config a list': {'generation_config.json': [1]},
    'generation of a watermark': {'generation_config.json': {'watermarking_config': 5, 'max_length': []}},
}

_ADAPTER = {'peft_type': 'LORA', 'base_model_name_or_path': '<model>', 'r': 4, 'target_modules': ['q_proj']}
#: An adapter_config.json beside the checkpoint, from which peft adapts the model.
ADAPTERS: dict[str, dict[str, Any]] = {
    'a pattern that never ends': {**_ADAPTER, 'target_modules': r'([\w.]+)*!'},
    'a pattern of ranks that never ends': {**_ADAPTER, 'rank_pattern': {r'([\w.]+)*!': 4}},
    'no pattern': {**_ADAPTER, 'target_modules': '('},
    'a rank of 2**70': {**_ADAPTER, 'r': 2**70},
    'a rank of text': {**_ADAPTER, 'r': 'x'},
    'modules that are numbers': {**_ADAPTER, 'target_modules': [5]},
    'a base that is a number': {**_ADAPTER, 'base_model_name_or_path': 5},
    'another kind of adapter': {**_ADAPTER, 'peft_type': 'NOPE'},
    'layers a million times': {**_ADAPTER, 'layer_replication': [[0, 2]] * 10**5},
}

CODE = {'AutoConfig': 'configuration_x.XConfig', 'AutoModelForCausalLM': 'someone/else--modeling_x.XModel'}


@dataclass(frozen=True)
class Outcome:
    """What a command did.

    Attributes:
        status: Exit status; the negative number of a signal.
        cpu_secs: CPU time, child processes included.
        peak_nbytes: Peak resident memory beyond that of the parent process.
    """

    status: int
    out: str
    err: str
    cpu_secs: float
    peak_nbytes: int


def cases() -> dict[str, dict[str, Any]]:
    """Case name to files; each case has a ``config.json``."""
    found: dict[str, dict[str, Any]] = {}
    for name, config in {**ABSURD, **WRONG}.items():
        found[name] = {'config.json': config}
    for name, files in BESIDE.items():
        found[name] = {'config.json': _LLAMA, **files}
    for name, adapter in ADAPTERS.items():
        found[name] = {'config.json': _LLAMA, 'adapter_config.json': adapter}
    found['code'] = {
        'config.json': _llama(auto_map=CODE),
        'tokenizer_config.json': {
            'tokenizer_class': 'PreTrainedTokenizerFast',
            'auto_map': {'AutoTokenizer': ['tokenization_x.XTokenizer', None]},
        },
        **{f'{kind}_x.py': 'open(__file__ + ".ran", "w")' for kind in ('configuration', 'modeling', 'tokenization')},
    }
    return found


def outcomes(folder: Path) -> dict[tuple[str, str], Outcome]:
    """The outcomes that the program left, by case and command."""
    content = json.loads((folder / 'outcomes.json').read_text())
    return {(name, command): Outcome(**found) for name, command, found in content}


def _write(folder: Path, files: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Write a model folder with a single-file checkpoint beside the config."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    if any('token' in name for name in files):
        save_tokenizer(folder, DECODER['vocab_size'])
    for name, content in files.items():
        text = content if name.endswith('.py') else json.dumps(content)
        (folder / name).write_text(text.replace('<model>', str(folder)))
    save_file(tensors, folder / 'model.safetensors', {'format': 'pt'})
    torch.save({'state_dict': tensors}, folder / 'iter_5.pth')


def _measured(run: Any, args: list[str], folder: Path) -> Outcome:
    """Run and measure ``run(args)`` in a fork."""
    files = [folder / 'stdout', folder / 'stderr']
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = os.fork()
    if not child:
        status = 99
        try:
            for fd, file in zip((1, 2), files, strict=True):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
            resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECS, _CPU_SECS + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_NBYTES, _MEMORY_NBYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            status = run(args)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    _, code, usage = os.wait4(child, 0)
    out, err = (file.read_text(errors='replace') for file in files)
    cpu, peak = usage.ru_utime + usage.ru_stime, (usage.ru_maxrss - before) * 1024
    return Outcome(os.waitstatus_to_exitcode(code), out[-3000:], err[-3000:], cpu, peak)


def main(folder: Path, *wanted: str) -> None:
    """Try these cases."""
    import peft  # noqa: F401
    import torch
    import transformers
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM  # noqa: F401  (imported before the forks)

    import xhf_hooks.convert  # noqa: F401
    from xhf_hooks.cli import convert, verify
    from xhf_hooks.meta_model import trial
    from xhf_hooks.verify import expected  # noqa: F401

    mock.patch.object(trial, '_CPU_SECS', _TRIAL_CPU_SECS).start()
    torch.set_num_threads(1)  # GNU OpenMP does not survive a fork
    model = LlamaForCausalLM(transformers.LlamaConfig(**DECODER))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    found = []
    known = cases()
    for number, name in enumerate(wanted):
        files = known[name]
        at = folder / str(number)
        _write(at / 'model', files, tensors)
        (at / 'checkpoint').mkdir()
        for file in (at / 'model').iterdir():
            if file.suffix != '.safetensors':
                os.link(file, at / 'checkpoint' / file.name)
        (at / 'model' / 'iter_5.pth').unlink()
        (at / 'model' / 'adapter_config.json').unlink(missing_ok=True)
        commands = {
            'verify': (verify.main, [str(at / 'model'), *(['--load'] if name == 'code' else [])]),
            'convert': (convert.main, [str(at / 'checkpoint' / 'iter_5.pth'), str(at / 'out')]),
        }
        for command, (run, args) in commands.items():
            outcome = _measured(run, args, at)
            found.append((name, command, asdict(outcome)))
    (folder / 'outcomes.json').write_text(json.dumps(found))


if __name__ == '__main__':
    main(Path(sys.argv[1]), *sys.argv[2:])
