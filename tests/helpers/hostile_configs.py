"""Config texts that would have an effect if any of their code were run or imported."""

from __future__ import annotations

from pathlib import Path


def hostile_texts(trace: Path) -> dict[str, str]:
    """Name to text; running a text creates ``trace``."""
    touch = f'open({str(trace)!r}, "w")'
    return {
        'call': f'model = {touch}',
        'system': f'import os\nmodel = os.system("touch {trace}")',
        'dunder': f'__import__("os").system("touch {trace}")',
        'in_dict': f'model = dict(type={touch})',
        'dict_replaced': f'dict = {touch}.write\nmodel = dict(type="x")',
        'lambda': f'model = (lambda: {touch})()',
        'comprehension': f'model = [{touch} for _ in range(3)]',
        'decorator': f'@{touch}\ndef f(): pass',
        'default': f'def f(a={touch}): pass',
        'class_body': f'class A:\n    x = {touch}',
        'f_string': f'model = f"{{{touch}}}"',
        'with': f'with {touch}: pass',
        'assert': f'assert {touch}',
        'walrus': f'(model := {touch})',
        'subscript': f'model = {{}}[{touch}]',
        'star': f'model = dict(**{touch})',
        'format': f'model = "{{0.__class__}}".format({touch})',
        'annotation': f'model: {touch} = 1',
        'while': f'while not {touch}: pass',
        'attribute': f'model = {touch}.name',
        'exec': f'exec({touch + ".write(str(1))"!r})',
        'deep': 'model = ' + '(' * 5000 + ')' * 5000,
        'null': 'model = 1\0',
    }
