"""Configs of finished runs, read and never run."""

from pathlib import Path

import pytest
from mmengine.config import Config

from xhf_hooks.errors import ConfigError
from xhf_hooks.offline.model.run_config import NotPlainError, Unread, find_run_config, parse_config

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
hooks = [dict(type='A')]
accumulative_counts = 16
accumulative_counts *= 2
if computed:
    hooks += [dict(type='B')]
    path = 'elsewhere'
also = hooks
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
    for name in ('hooks', 'also', 'accumulative_counts', 'path'):
        assert isinstance(read[name], Unread), f'{name} was changed by what is not read'


def test_a_dumped_config_is_read_as_mmengine_reads_it():
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


HEAD = "x = 1\nlora = dict(r=4, lora_alpha=16, names=['q'])\nmodel = dict(type='a.B', lora=lora)\n"
#: Statements that may change ``model`` after its definition, or that MMEngine runs before it reads the config.
NOT_PLAIN = (
    "_base_ = './other.py'",
    'from mmengine.config import read_base\nwith read_base():\n    from .b import *',
    "model['lora']['lora_alpha'] = 32",
    'model.lora.lora_alpha = 32',
    "model['lora'].update(lora_alpha=32)",
    "if True:\n    model['lora']['lora_alpha'] = 32",
    "if x:\n    y = 1\nelse:\n    lora |= {'lora_alpha': 32}",
    "if model.update(type='x'):\n    pass",
    "for part in (model['lora'],):\n    part['lora_alpha'] = 32",
    "lora |= {'lora_alpha': 32}",
    "names = lora['names']\nnames += ['k']",
    "names = model.lora.names\nnames += ['k']",
    "one = lora or 1\none |= {'lora_alpha': 32}",
    "del model['lora']['lora_alpha']",
    'patch(model)',
    'x = patch(lora)',
    'x = dict(a=patch(b=(1, lora)))',
    "y = [1, model.pop('lora')]",
    "y = lora.update({'lora_alpha': 32})",
    'y = [part.clear() for part in (lora,)]',
    "def change():\n    model['lora']['lora_alpha'] = 32",
    '(other := model)',
    'y = (model := {})',
    "globals()['model'] = {}",
    'with change() as model:\n    pass',
    'x, model = 1, {}',
)


@pytest.mark.parametrize('statement', NOT_PLAIN)
def test_what_is_not_plain_is_refused(statement):
    with pytest.raises(NotPlainError, match='give --config the config that MMEngine dumped'):
        parse_config(HEAD + statement, 'a.py')


def test_what_changes_nothing_is_read():
    unchanged = (
        "y = len(model)\nz = model['lora']['r']\nmodel2 = dict(model)\nq = dict(m=model)\n'text'\npass\n"
        "from os import path\nroot = '/a'\nfile = path.join('/a', 'b')\nsize = int(2048 - (336 / 14) ** 2)\n"
        'other: int = 1\nhooks = []\nif x > 1:\n    hooks += [lora]\ntable = dict(build([1]), **build([2]))\n'
    )
    read = parse_config(HEAD + unchanged, 'a.py')
    assert read['model'] == {'type': 'a.B', 'lora': {'r': 4, 'lora_alpha': 16, 'names': ['q']}}
    assert read['z'] == 4
    assert all(isinstance(read[name], Unread) for name in ('file', 'hooks', 'table'))


@pytest.mark.parametrize('dumped', ['meta', 'vis_data', 'work_dir', 'none'])
def test_a_refusal_names_the_config_that_mmengine_dumped(dumped, tmp_path):
    (tmp_path / 'given.py').write_text(HEAD + 'patch(model)')
    work_dir = tmp_path / 'work_dir'
    file = work_dir / {'vis_data': '20260101_000000/vis_data/config.py'}.get(dumped, 'run.py')
    file.parent.mkdir(parents=True)
    if dumped in ('vis_data', 'work_dir'):
        file.write_text(HEAD)
    with pytest.raises(ConfigError) as refusal:
        find_run_config(tmp_path / 'given.py', HEAD if dumped == 'meta' else None, work_dir / 'iter_5.pth')
    line = f"{tmp_path / 'given.py'}, line 4: 'patch(model)' is no plain assignment, and is not run; "
    remedy = {
        'meta': f'leave --config out: {work_dir / "iter_5.pth"} has the config that MMEngine dumped',
        'none': 'give --config the config that MMEngine dumped into the work_dir',
    }
    assert str(refusal.value) == line + remedy.get(dumped, f'give --config {file}, which MMEngine dumped')


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
