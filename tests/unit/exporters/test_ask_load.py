"""What is asked of from_pretrained without values is what it makes of files: tensors, ties, dtypes and problems."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models.families import MODELS
from tests.helpers.models.zoo import available, build
from xhf_hooks.exporters.ask_load import Loaded, ask_load
from xhf_hooks.exporters.loading_check import Problems
from xhf_hooks.exporters.traced import replay
from xhf_hooks.model import module_tensors, names_by_identity
from xhf_hooks.sources.stored_tensors import tensors_of

FAMILIES = [family for family in MODELS if available(family)]
WEIGHTS = 'model.safetensors'


def asked(model: Any, folder: Path) -> Loaded:
    config = type(model.config).from_pretrained(folder)
    return ask_load(type(model), config, {tensor.name: tensor for tensor in tensors_of(folder / WEIGHTS)}, 'auto')


def really_loaded(model: Any, folder: Path) -> tuple[Any, Problems]:
    options = dict(torch_dtype='auto', output_loading_info=True, ignore_mismatched_sizes=True)
    found, info = type(model).from_pretrained(folder, **options)
    shapes = [one if isinstance(one, str) else one[0] for one in info['mismatched_keys']]
    problems = {'missing': info['missing_keys'], 'unexpected': info['unexpected_keys'], 'of other shape': shapes}
    return found, {kind: sorted(names) for kind, names in problems.items()}


def without_shapes(problems: Problems) -> Problems:
    return {kind: [name.partition(' ')[0] for name in names] for kind, names in problems.items()}


@pytest.mark.parametrize('family', FAMILIES)
def test_tensors_ties_and_dtypes(family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    found, (loaded, problems) = asked(model, tmp_path), really_loaded(model, tmp_path)
    assert found.problems == problems
    expected, saved = dict(module_tensors(loaded)), dict(module_tensors(model))
    lost = {name for name, tensor in expected.items() if not torch.equal(tensor, saved[name])}
    # In some versions of transformers 4, from_pretrained without a device map ties it to one that is not in the file
    assert not lost or (family, lost) == ('roberta', {'lm_head.bias', 'lm_head.decoder.bias'})
    made = replay(found.made, load_file(tmp_path / WEIGHTS), with_copies=False)
    for name in made.keys() - lost:
        assert torch.equal(made[name], expected[name]), name
    tensors = dict(module_tensors(found.model))
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {n: t.dtype for n, t in expected.items()}
    assert {name for name, parameter in loaded.named_parameters() if parameter.requires_grad} <= made.keys()
    ties, expected_ties = ({tuple(names) for _, names in names_by_identity(one)} for one in (found.model, loaded))
    assert ties == expected_ties


def without(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def renamed(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[f'{name}.other'] = tensors.pop(name)


def longer(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.cat([tensors[name], tensors[name]])


@pytest.mark.parametrize('fault', [without, renamed, longer])
@pytest.mark.parametrize('family', [one for one in ('llama', 'llama_tied', 'bart', 'bert', 'llava') if available(one)])
def test_problems(family, fault, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    whole = load_file(tmp_path / WEIGHTS)
    names, with_problems = sorted(whole), 0
    for name in (names[0], names[len(names) // 2], names[-1]):
        tensors = dict(whole)
        fault(tensors, name)
        save_file(tensors, tmp_path / WEIGHTS, {'format': 'pt'})
        found, (_, problems) = asked(model, tmp_path), really_loaded(model, tmp_path)
        assert without_shapes(found.problems) == problems, name
        with_problems += any(problems.values())
    assert with_problems > 1, 'a buffer may be missing'
