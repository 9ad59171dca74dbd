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
        'huge_power': 'model = 10 ** 10 ** 10',
        'huge_product': 'model = "a" * 10 ** 12',
        'huge_sum': 'a = [0]\n' + 'a = a + a\n' * 60,
        'huge_nesting': 'a = [0]\n' + 'a = [a, a]\n' * 60,
        'null': 'model = 1\0',
    }


def hungry_texts() -> dict[str, str]:
    """Texts that would take gigabytes or minutes."""
    nested = 'a = [0]\n' + 'a = [a, a]\n' * 60
    long = 'x' * 400_000
    return {
        'long': 'a = 1\n' * 20_000_000,
        'many values': f'model = [{"0," * 490_000}]',
        'many fields': 'a=1\n' * 240_000,
        'many calls': 'a=f()\n' * 160_000,
        'many escapes': r"a='\d'" + '\n' + r"a='\d'; " * 100_000,
        'a base that doubles': f'{nested}_base_ = a',
        'a name that doubles': f'{nested}model = dict(type=a)',
        'long texts': f'a = {long!r}\n' + ''.join(f'b{i} = a + "x"\n' for i in range(30_000)),
        'long paths': f'from a import b as c\nd = c.{long}\n' + ''.join(f'b{i} = d.x\n' for i in range(30_000)),
        'many copies': 'a = dict('
        + ''.join(f'k{i}=0,' for i in range(40_000))
        + ')\n'
        + (''.join(f'b{i} = dict(a)\n' for i in range(30_000))),
        'sums of what is not read': 'a = ' + '(' * 150 + '[' + 'x,' * 400_000 + ']' + '+ 1)' * 150,
        'sums of what is not known': 'a = ' + 'x + ' * 200_000 + 'x',
        'number of many digits': 'a = ' + '9' * 900_000,
        'products': 'a = ' + '9' * 20 + (' * ' + '9' * 20) * 40_000,
        'deep brackets': 'a = ' + '[' * 400_000,
        'deep signs': 'a = ' + '-' * 900_000 + '1',
        'deep calls': 'a = ' + 'f(' * 300_000,
        'one long line of names': 'a = [' + 'x, ' * 300_000 + ']',
    }
