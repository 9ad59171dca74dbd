"""The weights of a base model's folder, and what is no such folder."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.checks.compare import assert_same_tensors
from tests.helpers.checks.read_checkpoint import read_tensors
from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.stored_tensors import base_weights

TENSORS = {'a': torch.randn(7, 3), 'b': torch.arange(5), 'c': torch.tensor(2.5, dtype=torch.float64)}


def test_those_of_each_file_that_the_index_names(tmp_path):
    files = {name: f'model-{name}.safetensors' for name in TENSORS}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, tmp_path / file)
    (tmp_path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': files}))
    assert_same_tensors(read_tensors(base_weights(tmp_path).values()), TENSORS)


@pytest.mark.parametrize(
    ('dtype', 'nbytes', 'words'),
    [
        ('F4', 1, 'a has dtype F4'),
        ('F32', 4, 'not a complete safetensors file.*copy it again'),
        ('X', 8, 'unknown variant'),
    ],
)
def test_is_refused(tmp_path, dtype, nbytes, words):
    header = json.dumps({'a': {'dtype': dtype, 'shape': [2], 'data_offsets': [0, nbytes]}}).encode()
    (tmp_path / 'model.safetensors').write_bytes(struct.pack('<Q', len(header)) + header + bytes(nbytes))
    with pytest.raises(CheckpointError, match=words):
        base_weights(tmp_path)
