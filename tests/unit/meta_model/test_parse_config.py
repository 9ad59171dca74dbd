"""Configs of finished runs, read and never run."""

from pathlib import Path

import pytest

from xhf_hooks.errors import ConfigError
from xhf_hooks.meta_model.run_config import Unread, parse_config

LAZY = """
from transformers import AutoModelForCausalLM, AutoTokenizer
import torch
import xtuner.model as models
from xtuner.utils import PROMPT_TEMPLATE

path = '/models/tiny'
template = PROMPT_TEMPLATE.qwen_chat
model = dict(
    type=models.SupervisedFinetune,
    llm=dict(type=AutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path=path, torch_dtype=torch.float16),
)
pair = (path, [-1, True])
computed = sorted([2, 1])
changed = [1]
changed += [2]
if computed:
    path = 'elsewhere'
"""


def test_a_lazy_config_reads_as_mmengine_dumps_it():
    """What is not read says where it stands."""
    read = parse_config(LAZY, 'a.py')
    assert read['model'] == {
        'type': 'xtuner.model.SupervisedFinetune',
        'llm': {
            'type': 'transformers.AutoModelForCausalLM.from_pretrained',
            'pretrained_model_name_or_path': '/models/tiny',
            'torch_dtype': 'torch.float16',
        },
    }
    assert read['pair'] == ('/models/tiny', [-1, True])
    assert read['template'] == 'xtuner.utils.PROMPT_TEMPLATE.qwen_chat'
    assert 'torch' not in read, 'a module is no field'
    assert read['computed'] == Unread('sorted([2, 1])', 14)
    assert isinstance(read['changed'], Unread), 'it was changed by what is not read'
    assert isinstance(read['path'], Unread)


def test_a_dumped_config_is_read_as_mmengine_reads_it():
    from mmengine.config import Config

    fields = {
        'model': {'type': 'a.B', 'nested': [{'x': (1, 2.5e-3)}, None, True], 'text': 'a"b\'c\nd{e}\\'},
        'lr': 1e-05,
        'betas': (0.9, 0.999),
        'names': {'a-b': -1, '1': 'x'},
        'empty': [],
    }
    text = Config(fields).pretty_text
    expected = Config.fromstring(text, '.py').to_dict()
    assert parse_config(text, 'dumped.py') == expected


LAZY_BASE = 'from mmengine.config import read_base\nwith read_base():\n    from .b import *\n'


@pytest.mark.parametrize('text', ["_base_ = './other.py'\nlr = 1", LAZY_BASE])
def test_an_inherited_config_is_refused(text):
    with pytest.raises(ConfigError, match='inherits'):
        parse_config(text, 'a.py')


#: Statements that may change ``model`` after its definition.
CHANGES = (
    "model['lora']['lora_alpha'] = 32",
    'model.lora.lora_alpha = 32',
    "model['lora'].update(lora_alpha=32)",
    'model.update(lora=dict(r=4))',
    "if True:\n    model['lora']['lora_alpha'] = 32",
    "for part in (model['lora'],):\n    part['lora_alpha'] = 32",
    "for name in ('lora',):\n    model[name]['lora_alpha'] = 32",
    "other = model\nother['lora']['lora_alpha'] = 32",
    "other = model['lora']\nother['lora_alpha'] = 32",
    "other = model if x else {}\nother['lora']['lora_alpha'] = 32",
    "other = dict(a=model)\nother['a']['lora']['lora_alpha'] = 32",
    "lora['lora_alpha'] = 32",
    "lora |= {'lora_alpha': 32}",
    "del model['lora']['lora_alpha']",
    'patch(model)',
    'x = patch(lora)',
    "def change():\n    model['lora']['lora_alpha'] = 32\nchange()",
    "(other := model)['lora']['lora_alpha'] = 32",
    "globals()['model'] = {}",
    'with change() as model:\n    pass',
    'x, model = 1, {}',
)


@pytest.mark.parametrize('statement', CHANGES)
def test_what_may_have_changed_is_unread(statement):
    head = "x = 1\nlora = dict(r=4, lora_alpha=16)\nmodel = dict(type='a.B', lora=lora)\nbeside = dict(c=[1])\n"
    read = parse_config(head + statement, 'a.py')
    assert isinstance(read['model'], Unread) or isinstance(read['model']['lora'], Unread)
    assert statement.startswith('globals') or read['beside'] == {'c': [1]}
    unchanged = (
        "print(model)\ny = len(model)\nz = model['lora']['r']\nmodel2 = dict(model)\nq = dict(m=model)\n'text'\n"
    )
    assert parse_config(head + unchanged, 'a.py')['model'] == {'type': 'a.B', 'lora': {'r': 4, 'lora_alpha': 16}}
    assert parse_config(head + unchanged, 'a.py')['z'] == 4


def test_a_list_that_gets_more_items_changes_none_of_those_it_has():
    """As in each of XTuner's configs, whose hooks hold the tokenizer."""
    head = 'tokenizer = dict(a=1)\nhooks = [dict(tokenizer=tokenizer)]\n'
    for change in ('if varlen:\n    hooks += [dict(b=2)]', "hooks[0]['b'] = 2"):
        read = parse_config(f'{head}{change}\nalso = hooks\n', 'a.py')
        assert read['tokenizer'] == {'a': 1}
        assert isinstance(read['hooks'], Unread) and isinstance(read['also'], Unread)


def hostile_texts(trace: Path) -> dict[str, str]:
    """Name to text; running any of its code creates ``trace``."""
    touch = f'open({str(trace)!r}, "w")'
    return {
        'call': f'model = {touch}',
        'system': f'import os\nmodel = os.system("touch {trace}")',
        'dunder': f'__import__("os").system("touch {trace}")',
        'dict_replaced': f'dict = {touch}.write\nmodel = dict(type="x")',
        'lambda': f'model = (lambda: {touch})()',
        'default': f'def f(a={touch}): pass',
        'f_string': f'model = f"{{{touch}}}"',
        'annotation': f'model: {touch} = 1',
        'exec': f'exec({touch + ".write(str(1))"!r})',
        'deep': 'model = ' + '(' * 5000 + ')' * 5000,
        'null': 'model = 1\0',
    }


@pytest.mark.parametrize('name', hostile_texts(Path('x')))
def test_nothing_is_run(name, tmp_path):
    trace = tmp_path / 'trace'
    text = hostile_texts(trace)[name]
    try:
        read = parse_config(text, 'hostile.py')
    except ConfigError as error:
        assert '\n' not in str(error) and 'hostile.py' in str(error)
    else:
        assert name == 'annotation' or not isinstance(read.get('model'), (str, int))
    assert not trace.exists()
