"""Checkpoints of live models; runs xhf-convert on them in this process, and compares its output with the hook's."""

import json
import re
from pathlib import Path
from typing import Any

from tests.helpers.models.zoo import build


def convert(*args: str | Path) -> Path:
    """Run the command, which must succeed; returns OUT."""
    from xhf_hooks.offline.commands.convert import main

    assert main([str(arg) for arg in args]) == 0
    return Path(args[1])


def refused(capsys: Any, *args: str | Path) -> str:
    """Run the command, which must refuse its arguments and write nothing; returns the one line that says why."""
    from xhf_hooks.offline.commands.convert import BAD_INPUT, main

    capsys.readouterr()
    assert main([str(arg) for arg in args]) == BAD_INPUT
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith('xhf-convert: ')]
    assert not Path(args[1]).exists()
    return line


def base_of(family: str, folder: Path) -> Path:
    """Save a model of `tests.helpers.models.families` as a base on the Hub: with the dtypes of its parts."""
    model = build(family)
    model.save_pretrained(folder)
    type(model).from_pretrained(folder).save_pretrained(folder)
    return folder


def checkpoint_of(model: Any, folder: Path, *, whole: bool = False, prefix: str = '') -> Path:
    """Write what was trained, or all of it, to ``folder/iter_2.pth``, and beside it the adapter's config."""
    import torch

    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    state = {f'{prefix}{name}': tensor for name, tensor in model.state_dict().items() if whole or name in trained}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({'state_dict': state}, folder / 'iter_2.pth')
    if hasattr(model, 'peft_config'):
        model.peft_config['default'].save_pretrained(folder)
    return folder / 'iter_2.pth'


def assert_converted_as_by_the_hook(checkpoint: Path, model: Any, folder: Path, *modes: str) -> None:
    """Convert a checkpoint of ``model`` to ``folder/MODE`` for each mode of the option lora, and compare."""
    from xhf_hooks import save_hf

    for mode in modes:
        save_hf(model, folder / f'hook_{mode}', lora=mode)
        assert_same_files(convert(checkpoint, folder / mode, '--lora', mode), folder / f'hook_{mode}')


def assert_same_files(folder: Path, expected: Path, but: str | None = None) -> None:
    """Check that all files have the same bytes, except the manifest, which records how the folder was made.

    Args:
        but: A subfolder that is left out.
    """
    found, wanted = ({n: c for n, c in _files(at).items() if n.split('/')[0] != but} for at in (folder, expected))
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    differing = [name for name in found if found[name] != wanted[name]]
    assert not differing, differing


def config_of(folder: Path) -> list[tuple[str, Any]]:
    """Items of config.json in order, without the path that the model was loaded from (transformers 4 writes it)."""
    fields = json.loads((folder / 'config.json').read_text())
    return [(name, value) for name, value in fields.items() if name != '_name_or_path']


def _files(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for path in folder.rglob('*'):
        if path.name == 'adapter_config.json':  # some of its lists are sets, whose order differs between processes
            fields = json.loads(path.read_text())
            content[str(path.relative_to(folder))] = {
                name: sorted(value) if isinstance(value, list) else value for name, value in fields.items()
            }
        elif path.name == 'config.json':
            content[str(path.relative_to(folder))] = config_of(path.parent)
        elif path.name == 'README.md':  # save_hf often gets no step
            step = r' after (epoch \d+, )?iteration \d+ of training'
            content[str(path.relative_to(folder))] = re.sub(step, '', path.read_text())
        elif path.is_file() and path.name != 'xhf_manifest.json':
            content[str(path.relative_to(folder))] = path.read_bytes()
    return content
