"""Base models that are the same in every environment, and the file that saving them must produce.

    python -m tests.helpers.same_weights tests/data/both_stacks.json

Run in XTuner's environment, whose transformers has fewer families, this writes the reference of
tests/unit/test_both_stacks.py: for each family the names and shapes in the base's file, and the SHA-256 of the export.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.engines import save_folder
from tests.helpers.zoo import FAMILIES, available, build


def base_layout(family: str, folder: Path) -> dict[str, list[int]]:
    """Save a model of `family` in `folder`; returns the names and shapes that this transformers writes."""
    build(family).to(torch.bfloat16).save_pretrained(folder)
    return {name: list(tensor.shape) for name, tensor in load_file(folder / 'model.safetensors').items()}


def exported_sha256(family: str, layout: dict[str, list[int]], folder: Path) -> str:
    """SHA-256 of model.safetensors from a save of the bfloat16 model whose base has `layout`.

    The base's values are derived from its names, whatever the way this transformers builds the model. The hash covers
    the whole file: names, dtypes, shapes, order, offsets and all bytes.
    """
    model_class = type(build(family))
    base_layout(family, folder / 'base')  # writes its config.json
    weights = {name: _values(name, shape) for name, shape in layout.items()}
    save_file(weights, folder / 'base' / 'model.safetensors', metadata={'format': 'pt'})
    model = model_class.from_pretrained(folder / 'base', torch_dtype=torch.bfloat16)
    save_folder(model, folder / 'hf_model')
    return hashlib.sha256((folder / 'hf_model' / 'model.safetensors').read_bytes()).hexdigest()


def _values(name: str, shape: list[int]) -> torch.Tensor:
    """256ths from -0.5 to 0.5, drawn as integers, so that they do not depend on the CPU's arithmetic."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], 'big')
    drawn = torch.randint(-128, 129, shape, generator=torch.Generator().manual_seed(seed))
    return (drawn / 256).to(torch.bfloat16)


def _describe(family: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        layout = base_layout(family, Path(folder, 'layout'))
        return {'sha256': exported_sha256(family, layout, Path(folder)), 'base': layout}


if __name__ == '__main__':
    found = {family: _describe(family) for family in FAMILIES if available(family)}
    lines = [f'{json.dumps(family)}: {json.dumps(described)}' for family, described in found.items()]
    Path(sys.argv[1]).write_text('{\n' + ',\n'.join(lines) + '\n}\n')
