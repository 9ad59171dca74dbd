"""Complete model folders with a manifest, made without the code that reads them."""

import copy
import json
import struct
import zlib
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from tests.helpers.models.zoo import build
from xhf_hooks.compat.transformers import text_config


def save_model(family: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Save a tiny model with ``save_pretrained``, and a tokenizer with a token for each row of its embedding."""
    model = build(family).to(dtype)
    model.save_pretrained(folder, **options)
    save_tokenizer(folder, text_config(model.config).vocab_size)
    return folder


def resize_embeddings(model: Any, n_rows: int) -> None:
    """Resize as transformers before 4.46 did, without new rows that are drawn around the mean of the others."""
    options = {'mean_resizing': False} if 'mean_resizing' in signature(model.resize_token_embeddings).parameters else {}
    model.resize_token_embeddings(n_rows, **options)


def save_tokenizer(folder: Path, n_tokens: int) -> None:
    """Save a tokenizer with words ``w0``, ``w1``, ... after the special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ['<pad>', '<s>', '</s>', '<unk>', *(f'w{i}' for i in range(n_tokens - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token='<pad>', bos_token='<s>', eos_token='</s>', unk_token='<unk>'
    )
    fast.save_pretrained(folder)


def write_manifest(folder: Path) -> Path:
    """Write the ``xhf_manifest.json`` that a save would write for these files."""
    files = {}
    for path in sorted(folder.rglob('*')):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name == 'xhf_manifest.json':
            continue
        data = path.read_bytes()
        files[name] = {'nbytes': len(data), 'crc32': f'{zlib.crc32(data):08x}'}
        if name.endswith('.safetensors'):
            files[name]['tensors'] = _tensors(data)
    manifest = {
        'format_version': 2,
        'step': {'unit': 'iter', 'number': 7},
        'iteration': 7,
        'epoch': None,
        'packages': {},
        'engine': 'deepspeed',
        'zero_stage': 3,
        'world_size': 2,
        'writer': 'positional',
        'dtype': 'as trained',
        'files': files,
    }
    (folder / 'xhf_manifest.json').write_text(json.dumps(manifest))
    return folder


def _tensors(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack('<Q', data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop('__metadata__', None)
    found = {}
    for name, tensor in header.items():
        start, end = (8 + length + offset for offset in tensor['data_offsets'])
        crc = f'{zlib.crc32(data[start:end]):08x}'
        found[name] = {'shape': tensor['shape'], 'dtype': tensor['dtype'], 'crc32': crc, 'non_finite': 0}
    return found


def edit_json(path: Path, **changed: Any) -> None:
    """Replace keys of a JSON file; None removes a key."""
    content = {**json.loads(path.read_text()), **changed}
    path.write_text(
        json.dumps({key: value for key, value in content.items() if value is not None or key not in changed})
    )


def flip(path: Path, at: int) -> None:
    """Flip a bit of a byte; negative offsets count from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def with_base(model, folder: Path, **config):
    """Makes ``folder`` the base that ``model`` was loaded from."""
    base = copy.deepcopy(model.config)
    base.update(config)
    base.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


def with_whole_base(model: Any, folder: Path) -> Any:
    """Makes ``folder`` the base that ``model`` was loaded from, with weights."""
    model.save_pretrained(folder)
    model.config._name_or_path = str(folder)
    return model


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Replace the tensors of a folder by what ``edit`` makes of them."""
    from safetensors.torch import load_file, save_file

    file = folder / 'model.safetensors'
    save_file(edit(load_file(file)), file, {'format': 'pt'})


def rename_tensors(folder: Path, now: str, before: str) -> None:
    """Give tensors of a folder the names that an older version wrote.

    Args:
        now: What stands in some of their names.
        before: What stood there before.
    """

    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        older = {name.replace(now, before): tensor for name, tensor in tensors.items()}
        assert older.keys() != tensors.keys()
        return older

    edit_tensors(folder, renamed)
