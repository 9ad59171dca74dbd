"""Mutations of configs: JSON (of a model, an adapter, a tokenizer) and the Python text of a run."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

from tests.helpers.mutate import mutated_json, places_in

#: Plausible values from which nothing, or something too large, would be built.
_ABSURD: dict[str, list[Any]] = {
    'architectures': [['pipeline'], ['AutoModel'], ['load_tf_weights_in_bert'], ['LlamaConfig'], ['os.system'],
                      'Llama', [7],
                      [], ['LlamaForCausalLM'] * 3, ['MistralForCausalLM'], ['Trainer'], ['PreTrainedModel'], [None],
                      ['\n\n']],
    'model_type': [['llama'], 'mistral', 'bert', 't5', 'llava', 'x\x1b[2J', '', 7, None, 'auto', 'whisper', {}],
    'hidden_act': ['nope', 7, None, ['silu'], '\n' * 100, 'x' * 10**5],
    'rope_parameters': [{'rope_type': 'nope'}, {'rope_type': 'linear', 'factor': -1}, {'rope_type': 'yarn'}, 7, [], {}],
    'rope_scaling': [{'type': 'nope'}, {'type': 'dynamic', 'factor': 'x'}, {'rope_type': 'longrope'}, 7],
    'id2label': [{str(i): 'x' for i in range(10**5)}, {'a': 1}, [], 7, {'0': ['\n']}],
    'quantization_config': [{}, {'quant_method': 'gptq'}, {'quant_method': 'bitsandbytes', 'load_in_4bit': True}, 7],
    'auto_map': [{'AutoConfig': 'evil.Config', 'AutoModelForCausalLM': 'evil.Model'}, 7, {'AutoModel': ['a', 'b']}],
    'dtype': ['float4', 'bfloat16\n', 'os.system', 7, None, 'int8'],
    'target_modules': ['all-linear', '.*', '(a+)+$', [], [7], ['x'] * 10**4, 7, {'q_proj': 1}, '[', 'q_proj|' * 10**4],
    'r': [0, -1, 2**31, 10**12, 'x', None, 3, 1e9, True],
    'peft_type': ['IA3', 'LORA\n', 'ADALORA', 'PREFIX_TUNING', 7, None, 'nope', 'LOHA', 'VERA'],
    'task_type': ['SEQ_CLS', 'nope', 7, None, 'TOKEN_CLS'],
    'base_model_name_or_path': ['/etc', '', 7, None, '../..', '\x1b[2J', 'x' * 10**5, '/dev/zero', '/proc/self/fd/0',
                                'a\0b'],
    'rank_pattern': [{'.*': 10**9}, {'(a+)+$': 2}, 7, {'q_proj': -1}],
    'modules_to_save': [['lm_head'], ['.*'], 7, ['no_such'], 'lm_head'],
    'tokenizer_class': ['os.system', 'BertTokenizer', 7, None, 'T5Tokenizer', 'LlamaTokenizer',
                        'PreTrainedTokenizerBase'],
    'chat_template': ['{% for i in range(10**9) %}{{ i }}{% endfor %}', '{{ 7', 7, 'x' * 10**6, ['a']],
    'added_tokens_decoder': [{'9' * 30: {'content': 'x'}}, {'a': 7}, 7, []],
    'extra_special_tokens': [7, ['x'] * 10**4, {'a': 'b'}, [7]],
}  # fmt: skip
_MOST_NBYTES = 32 * 10**6


def mutated_config(text: bytes, number: int) -> bytes:
    """One to three edits of a JSON file, including those of :func:`mutated_json`."""
    rng = random.Random(number)
    content = json.loads(text)
    if rng.random() < 0.25:
        return _dumped(mutated_json(content, number))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(places_in(content))
        if places:
            _edit(content, places, rng)
    data = _dumped(content)
    return data if len(data) < _MOST_NBYTES else text


def _edit(content: Any, places: list[tuple[Any, Any]], rng: random.Random) -> None:
    parent, key = rng.choice(places)
    value, kind = parent[key], rng.randrange(6)
    if kind == 0:
        numbers = [(p, k) for p, k in places if type(p[k]) in (int, float)]
        if numbers:
            parent, key = rng.choice(numbers)
            parent[key] *= rng.choice([0, -1, 2, 10, 10**3, 10**5, 10**7, 10**9, 2**70, 0.5, 10**60])
    elif kind == 1 and isinstance(value, list):
        parent[key] = value * 10 ** rng.randint(1, 6 if len(value) < 10 else 3)
    elif kind == 2:
        other, name = rng.choice(places)
        value = copy.deepcopy(value)
        if isinstance(other, dict):
            other[key if isinstance(key, str) else str(name)] = value
        elif isinstance(parent, dict) and isinstance(value, (dict, list)):
            parent[key] = {key: value}
    elif kind == 3 and isinstance(parent, dict):
        inner = [p for p, _ in places if isinstance(p, dict)]
        target = rng.choice(inner)
        name = rng.choice(list(_ABSURD))
        target[name] = copy.deepcopy(rng.choice(_ABSURD[name]))
    elif kind == 4 and isinstance(content, dict):
        name = rng.choice([name for name in _ABSURD if name in content] or list(_ABSURD))
        content[name] = copy.deepcopy(rng.choice(_ABSURD[name]))
    elif isinstance(parent, dict):
        parent[rng.choice(['text_config', 'vision_config', key.upper(), f'{key}\n\x1b[2J', 'num_labels'])] = value


def mutated_text(text: str, number: int) -> str:
    """One to three edits of Python text: literals, names and lines replaced, repeated, nested or swapped."""
    rng = random.Random(number)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        tokens = re.findall(r"'[^']*'|[\w.]+|\s+|.", text)
        at = rng.randrange(len(tokens))
        kind = rng.randrange(6)
        if kind == 0:
            tokens[at] = rng.choice(_TOKENS)
        elif kind == 1:
            tokens[at] = tokens[rng.randrange(len(tokens))]
        elif kind == 2:
            count = min(10 ** rng.randint(1, 6), 10**7 // len(tokens[at]))
            tokens[at] = tokens[at] * count
        elif kind == 3:
            depth, (left, right) = (
                10 ** rng.randint(1, 5),
                rng.choice(['()', '[]', ('dict(a=', ')'), ('-', ''), ('[', ',0]')]),
            )
            tokens[at] = left * depth + tokens[at] + right * depth
        elif kind == 4:
            lines = text.splitlines(keepends=True)
            rng.shuffle(lines)
            tokens = lines * rng.choice([1, 1, 2, 10**4])
        else:
            del tokens[at]
        text = ''.join(tokens)
        if len(text) > 10**6:
            break
    return text


_TOKENS = [
    '', '0', '-1', '10**9', '10 ** 10 ** 10', '9' * 10_000, '1e999', 'None', "''", "'\\n\\x1b[2J'", '"" * 10**10',
    '[0] * 10**10',
    '__import__("os")', 'open("x", "w")', 'lambda: 0', 'model', '{{}}', '*model', '**model',
    '[model for model in model]',
    "'/dev/zero'", "'/proc/self/mem'", "'../../..'", '\0', '\ud800', '#', "'''", '\\', ':', '=', 'import os\n',
    "'base' 'base'",
    "f'{model}'", '1 if 1 else 2', "'a'.join('b')", 'model.llm', 'model["llm"]', '...', '1j', "b'x'", '{1: {2: 3}}',
    '~0', '@',
]  # fmt: skip


def _dumped(content: Any) -> bytes:
    return json.dumps(content).encode('utf-8', 'surrogatepass')
