"""A run without a config.json, whose base is a backbone: the class that was trained follows from the tensors.

Each head that transformers has for each kind of backbone, as plain torch, Accelerate and DeepSpeed leave it: a state
dict, and `--base`.
"""

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.converted import convert, refused
from tests.helpers.models.zoo import ODD, ODD_ENCODER, small_config
from tests.helpers.runs.made_checkpoint import MadeCheckpoint
from tests.helpers.tiers import split_tiers
from xhf_hooks import save_hf
from xhf_hooks.offline.commands.convert import main

_SPEECH = {
    **dict(vocab_size=32, conv_dim=(8, 8), conv_kernel=(4, 4), conv_stride=(2, 2), num_feat_extract_layers=2),
    **dict(num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, codevector_dim=8, proj_codevector_dim=8),
    **dict(xvector_output_dim=8, tdnn_dim=(8, 8), tdnn_kernel=(2, 1), tdnn_dilation=(1, 1)),
}
_IMAGES = {**ODD_ENCODER, 'image_size': 8, 'patch_size': 4}
_SWIN = {'image_size': 32, 'embed_dim': 24, 'depths': [1, 2], 'num_heads': [2, 3], 'window_size': 4}
#: Kind of backbone: fields of its config.
BACKBONES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(('BertModel', 'RobertaModel', 'DebertaV2Model'), ODD_ENCODER),
    **dict.fromkeys(('ViTModel', 'Dinov2Model'), _IMAGES),
    'SwinModel': _SWIN,
    **dict.fromkeys(('HubertModel', 'Wav2Vec2Model'), _SPEECH),
    'T5Model': {'decoder_start_token_id': 0},
    **dict.fromkeys(('LlamaModel', 'Qwen3Model', 'GemmaModel'), ODD),
}
_HEADS = (
    *('MaskedLM', 'PreTraining', 'CausalLM', 'ConditionalGeneration', 'SequenceClassification', 'TokenClassification'),
    *('QuestionAnswering', 'MultipleChoice', 'NextSentencePrediction', 'ImageClassification', 'MaskedImageModeling'),
    *('CTC', 'AudioFrameClassification', 'XVector'),
)


def heads() -> list[Any]:
    """Base and trained class; of four in a row, the first tier converts one."""
    names = [(base, f'{base.removesuffix("Model")}For{head}') for base in BACKBONES for head in _HEADS]
    found = [pair for pair in [*names, ('T5Model', 'T5EncoderModel')] if hasattr(transformers, pair[1])]
    return split_tiers(found, 4)


@pytest.fixture
def from_backbone(tmp_path):
    def make(base: str, kind: str, **options: Any) -> Any:
        torch.manual_seed(0)
        backbone = getattr(transformers, base)(small_config(base, BACKBONES[base]))
        backbone.save_pretrained(tmp_path / 'base')
        kind = getattr(transformers, kind)
        return kind.from_pretrained(tmp_path / 'base', ignore_mismatched_sizes=True, **options)

    return make


@pytest.mark.parametrize(('base', 'kind'), heads())
def test_each_head_that_training_put_on_a_backbone(from_backbone, base, kind, tmp_path, capsys):
    """With as many labels and tokens as were trained; where several classes read the tensors, `--architecture` says."""
    options = {'num_labels': 7} if 'Classification' in kind else {'vocab_size': 45} if kind.endswith('CTC') else {}
    model = from_backbone(base, kind, **options)
    save_hf(model, tmp_path / 'hook')
    torch.save(model.state_dict(), tmp_path / 'x.pth')
    command = [str(tmp_path / 'x.pth'), str(tmp_path / 'out'), '--base', str(tmp_path / 'base')]
    if main(command):
        said = capsys.readouterr().err
        assert kind in said or 'that the checkpoint lacks' in said, said
        assert '--architecture' in said
        convert(*command, '--architecture', kind)
    assert_same_folder_tensors(tmp_path / 'out', tmp_path / 'hook')
    found, expected = (json.loads((tmp_path / folder / 'config.json').read_text()) for folder in ('out', 'hook'))
    for field in ('architectures', 'id2label', 'vocab_size', 'model_type'):
        assert found.get(field) == expected.get(field), field
    assert not (tmp_path / 'out' / 'other_modules').exists()


@pytest.mark.parametrize('prefix', ['model.', '_forward_module.module.'])
def test_a_head_in_another_module(from_backbone, prefix, tmp_path):
    """As Lightning has it: what lies beside the backbone is the model's, what lies around it is not."""
    model = from_backbone('BertModel', 'BertForTokenClassification', num_labels=7)
    save_hf(model, tmp_path / 'hook')
    state = {f'{prefix}{name}': tensor for name, tensor in model.state_dict().items()}
    torch.save({**state, 'loss.weight': torch.ones(7)}, tmp_path / 'x.pth')
    out = convert(tmp_path / 'x.pth', tmp_path / 'out', '--base', tmp_path / 'base')
    assert load_file(out / 'model.safetensors').keys() == load_file(tmp_path / 'hook' / 'model.safetensors').keys()
    assert load_file(out / 'other_modules' / 'model.safetensors').keys() == {'loss.weight'}


def test_a_head_of_no_class_goes_beside_the_backbone(from_backbone, tmp_path, capsys):
    model = from_backbone('BertModel', 'BertForSequenceClassification')
    state = {**model.state_dict(), 'transitions': torch.ones(3, 3)}
    torch.save(state, tmp_path / 'x.pth')
    out = convert(tmp_path / 'x.pth', tmp_path / 'out', '--base', tmp_path / 'base')
    assert json.loads((out / 'config.json').read_text())['architectures'] == ['BertModel']
    beside = load_file(out / 'other_modules' / 'model.safetensors')
    assert beside.keys() == {'classifier.weight', 'classifier.bias', 'transitions'}
    said = capsys.readouterr().err
    assert "no class of transformers for BertConfig has the checkpoint's tensors beside the BertModel (" in said


@pytest.mark.parametrize('base', ['BertModel', 'RobertaModel', 'ViTModel'])
def test_what_an_argument_of_the_constructor_leaves_out_is_not_missing(from_backbone, base, tmp_path, capsys):
    model = from_backbone(base, base, add_pooling_layer=False)
    save_hf(model, tmp_path / 'hook')
    torch.save({f'backbone.{name}': tensor for name, tensor in model.state_dict().items()}, tmp_path / 'x.pth')
    out = convert(tmp_path / 'x.pth', tmp_path / 'out', '--base', tmp_path / 'base')
    assert_same_folder_tensors(out, tmp_path / 'hook')
    assert f'{base} was built with add_pooling_layer=False' in capsys.readouterr().err


def test_a_frozen_pooler_that_the_checkpoint_lacks_is_the_bases(from_backbone, tmp_path):
    model = from_backbone('BertModel', 'BertModel')
    trained = {name: tensor for name, tensor in model.state_dict().items() if 'pooler' not in name}
    checkpoint = MadeCheckpoint(masters=trained, dtype=torch.float16, stage=2).write(tmp_path / 'x')
    out = folder_tensors(convert(checkpoint, tmp_path / 'out', '--base', tmp_path / 'base'))
    of_base = load_file(tmp_path / 'base' / 'model.safetensors')
    assert torch.equal(out['pooler.dense.weight'], of_base['pooler.dense.weight'].half())  # as training cast it


def test_a_backbone_that_was_trained_alone_keeps_its_class(from_backbone, tmp_path):
    """A T5EncoderModel reads a part of a T5Model: what is left is the base's."""
    model = from_backbone('T5Model', 'T5Model')
    save_hf(model, tmp_path / 'hook')
    torch.save({f't5.{name}': t for name, t in model.state_dict().items()}, tmp_path / 'x.pth')
    out = convert(tmp_path / 'x.pth', tmp_path / 'out', '--base', tmp_path / 'base')
    assert_same_folder_tensors(out, tmp_path / 'hook')


@pytest.mark.parametrize('name', ['BertForNothing', 'nn.Module', 'BertConfig'])
def test_an_architecture_that_transformers_lacks(from_backbone, name, tmp_path, capsys):
    torch.save(from_backbone('BertModel', 'BertModel').state_dict(), tmp_path / 'x.pth')
    command = tmp_path / 'x.pth', tmp_path / 'out', '--base', tmp_path / 'base', '--architecture', name
    assert 'architecture' in (said := refused(capsys, *command)) and f'found {name!r}' in said


def test_the_given_architecture_must_have_the_tensors(from_backbone, tmp_path, capsys):
    torch.save(from_backbone('BertModel', 'BertForMaskedLM').state_dict(), tmp_path / 'x.pth')
    kind = 'BertForTokenClassification'
    line = refused(capsys, tmp_path / 'x.pth', tmp_path / 'out', '--base', tmp_path / 'base', '--architecture', kind)
    assert 'the checkpoint has tensors that the model of' in line
