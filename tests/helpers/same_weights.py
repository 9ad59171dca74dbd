"""Base models that are the same in every environment, and the file that a save of them must give.

    python -m tests.helpers.same_weights tests/data/both_stacks.json

run in XTuner's environment, whose transformers knows fewer families, writes what tests/unit/test_both_stacks.py
compares with: for each family the layout of the base's file (names and shapes), and the SHA-256 of the exported one.
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
    """Names and shapes that this transformers writes for a model of `family`, which it leaves in `folder`."""
    build(family).to(torch.bfloat16).save_pretrained(folder)
    return {name: list(tensor.shape) for name, tensor in load_file(folder / 'model.safetensors').items()}


def exported_sha256(family: str, layout: dict[str, list[int]], folder: Path) -> str:
    """SHA-256 of model.safetensors of a save of the bfloat16 model that starts from a base with `layout`.

    The values of the base follow from its names and do not depend on how this transformers builds the model. The
    hash is of the whole file: names, types, shapes, order, offsets and all bytes.
    """
    model_class = type(build(family))
    base_layout(family, folder / 'base')  # for its config.json
    weights = {name: _values(name, shape) for name, shape in layout.items()}
    save_file(weights, folder / 'base' / 'model.safetensors', metadata={'format': 'pt'})
    model = model_class.from_pretrained(folder / 'base', torch_dtype=torch.bfloat16)
    save_folder(model, folder / 'hf_model')
    return hashlib.sha256((folder / 'hf_model' / 'model.safetensors').read_bytes()).hexdigest()


def _values(name: str, shape: list[int]) -> torch.Tensor:
    """256ths from -0.5 to 0.5, drawn as integers, so that no processor's arithmetic has a say."""
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
