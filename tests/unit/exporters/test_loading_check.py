"""What would not load is found before anything is written, whatever the cause; and training notices nothing of it."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.helpers.checks.compare import assert_same_folder_tensors, loaded, same_logits
from tests.helpers.models.adapted import Planned, adapted, around
from tests.helpers.models.families import MODELS
from tests.helpers.models.model_folder import edit_tensors
from tests.helpers.models.own_classes import CounterConfig, CounterModel
from tests.helpers.models.zoo import available, build, small_config
from tests.helpers.runs.engines import save_folder
from xhf_hooks.compat.transformers import converts_weights
from xhf_hooks.errors import AgreedError, ModelError
from xhf_hooks.exporters.traced_entries import entries_of
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import Placement
from xhf_hooks.planning.write_strategy import WriteStrategy


def planned(model: nn.Module, **options: Any) -> tuple[Planned, list[Placement]]:
    exporter = Planned(model, None, None, options)
    sizes = dict(max_shard_nbytes=10**9, bucket_nbytes=10**9)
    plan = make_plan(exporter.entries, exporter.request.specs, strategy=WriteStrategy.GATHER, **sizes)
    return exporter, plan.placements


def changed(placements: list[Placement], name: str, **fields: Any) -> list[Placement]:
    assert [place for place in placements if place.hf_name == name]
    return [replace(place, **fields) if place.hf_name == name else place for place in placements]


NORM = 'model.norm.weight'
SIZE = small_config(*MODELS['llama']).hidden_size


@pytest.mark.parametrize(
    ('fields', 'said'),
    [
        (dict(hf_name='model.final_norm.weight'), rf'1 missing: {NORM}; 1 unexpected: model\.final_norm\.weight'),
        (dict(shape=(36,)), rf'1 of other shape: {NORM}( \(36,\), expected \({SIZE},\))?\.'),
    ],
)
def test_a_renamed_key_and_a_wrong_shape(fields, said):
    exporter, placements = planned(build('llama'))
    with pytest.raises(ModelError, match=f'LlamaForCausalLM would not load.*{said}.*docs/extending'):
        exporter.check_loading(changed(placements, NORM, **fields))


@pytest.mark.modern_only
def test_an_unfused_expert_that_is_missing():
    """transformers 5 fuses experts when it loads them."""
    if not available('qwen3_moe'):
        pytest.skip('not in this transformers')
    exporter, placements = planned(build('qwen3_moe'))
    with pytest.raises(ModelError, match='Qwen3MoeForCausalLM would not load'):
        exporter.check_loading([place for place in placements if 'layers.1.mlp.experts' not in place.hf_name])


def checked_as_tied(family: str, is_tied: bool) -> list[str]:
    exporter, placements = planned(build(family))
    exporter.export.config.tie_word_embeddings = is_tied
    return exporter.check_loading(placements)


def test_a_tie_that_the_config_does_not_have():
    with pytest.raises(ModelError, match=r'missing: lm_head\.weight|not tied to what is saved: lm_head\.weight'):
        checked_as_tied('llama_tied', False)


def test_a_tie_of_two_tensors_that_are_stored():
    """transformers 4 makes one of them. transformers 5 compares their values, and does not."""
    if converts_weights():
        assert checked_as_tied('llama', True) == []
        return
    said = 'tied, but trained apart: model.embed_tokens.weight and lm_head.weight.*set tie_word_embeddings to False'
    with pytest.raises(ModelError, match=said):
        checked_as_tied('llama', True)


def test_an_adapter_is_loaded_by_peft():
    exporter, placements = planned(around(llm=adapted('llama', modules_to_save=['lm_head'])))
    assert exporter.check_loading(placements) == []
    name = next(place.hf_name for place in placements if 'v_proj.lora_B' in place.hf_name)
    for fields, said in [
        (dict(hf_name=name.replace('lora_B', 'lora_C')), f'missing: {re.escape(name)}.*unexpected'),
        (dict(shape=(9, 3)), r'of other shape: .*v_proj.lora_B.weight \(9, 3\), expected \(10, 3\)'),
    ]:
        with pytest.raises(ModelError, match=f'peft, with this adapter of a LlamaForCausalLM, would not load.*{said}'):
            exporter.check_loading(changed(placements, name, **fields))


def test_before_the_first_step_it_is_an_error_of_all_ranks(monkeypatch, tmp_path):

    def forgets_a_tensor(weights: Any, own: Any) -> Any:
        return [entry for entry in entries_of(weights, own) if entry.hf_name != NORM]

    monkeypatch.setattr('xhf_hooks.exporters.huggingface.entries_of', forgets_a_tensor)
    with pytest.raises(AgreedError, match=f"stage 'check loading' failed on rank 0: .*1 missing: {NORM}"):
        save_folder(build('llama'), tmp_path / 'hf_model')
    assert not (tmp_path / 'hf_model').exists()


def test_what_cannot_be_tried_is_one_line(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError('transformers needs\naccelerate for this')

    exporter, placements = planned(CounterModel(CounterConfig()))
    monkeypatch.setattr(CounterModel, 'from_pretrained', refuse)
    (note,) = exporter.check_loading(placements)
    assert 'CounterModel: ImportError: transformers needs accelerate' in note and '\n' not in note


def leaves_traces(*_: Any, **__: Any) -> None:
    torch.set_default_dtype(torch.float64)
    torch.rand(3)
    raise RuntimeError('half done')


def test_training_notices_nothing_of_a_check_that_fails(monkeypatch):
    model = build('llama')
    exporter, placements = planned(model)
    monkeypatch.setattr(transformers.LlamaForCausalLM, 'from_pretrained', leaves_traces)
    config, state, dtype = model.config.to_dict(), torch.get_rng_state(), torch.get_default_dtype()
    exporter.check_loading(placements)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == dtype
    assert model.config.to_dict() == config
    assert {parameter.device.type for parameter in model.parameters()} == {'cpu'}


# What describes the weights: ties and quantizers


@pytest.mark.parametrize('is_tied', [True, False])
def test_ties_against_the_config(is_tied, tmp_path):
    """The config says what the weights are: else the head is random, or the embedding, once loaded."""
    model = build('llama' if is_tied else 'llama_tied')
    head = model.model.embed_tokens.weight if is_tied else nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.lm_head.weight = head
    before = model.config.tie_word_embeddings
    save_folder(model, tmp_path)
    again = loaded(tmp_path, type(model))
    assert again.config.tie_word_embeddings is is_tied and model.config.tie_word_embeddings is before
    assert same_logits(model, again)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is is_tied


def seq2seq(name: str, is_tied: bool | None = None) -> Any:
    """A model of an encoder and a decoder, with noise in each tensor.

    Args:
        is_tied: ``tie_word_embeddings`` of its config; None for the class's own.
    """
    sizes = dict(d_model=36, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=1, num_heads=4)
    sizes.update(encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4)
    sizes.update(encoder_ffn_dim=48, decoder_ffn_dim=48, num_experts=2, vocab_size=131, pad_token_id=0)
    ties = {} if is_tied is None else dict(tie_word_embeddings=is_tied)
    config = getattr(transformers, f'{name}Config')(**sizes, **ties, decoder_start_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f'{name}ForConditionalGeneration')(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape)
    return model.eval()


def with_its_own_head(model: Any) -> Any:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.5)
    return model


def same_seq2seq_logits(one: Any, two: Any) -> bool:
    ids = dict(input_ids=torch.arange(3, 12)[None], decoder_input_ids=torch.arange(4)[None])
    with torch.no_grad():
        return torch.equal(one(**ids).logits, two.eval()(**ids).logits)


#: Their forward scales what the head gets, if the config says that it is tied.
SCALED = ('T5', 'UMT5', 'LongT5', 'SwitchTransformers')


@pytest.mark.parametrize('name', SCALED)
def test_heads_of_which_the_config_is_also_read_in_forward(name, tmp_path):
    """transformers 4 ties what is stored apart: if saying otherwise changes the logits, that cannot be saved."""
    apart = with_its_own_head(seq2seq(name))
    if converts_weights():
        save_folder(apart, tmp_path / 'apart')
        assert same_seq2seq_logits(apart, loaded(tmp_path / 'apart', type(apart)))
    else:
        with pytest.raises(AgreedError, match=r'tied, but trained apart: .*set tie_word_embeddings to False'):
            save_folder(apart, tmp_path / 'apart')
    tied = seq2seq(name, False)
    tied.lm_head.weight = tied.shared.weight
    save_folder(tied, tmp_path / 'tied')
    assert same_seq2seq_logits(tied, loaded(tmp_path / 'tied', type(tied)))


@pytest.mark.parametrize('name', [*SCALED, 'MT5'])
def test_heads_of_their_own_as_in_flan_t5(name, tmp_path):
    """Their config says so, and in transformers 5 it nevertheless says that the head is tied."""
    base = seq2seq(name, False)
    base.save_pretrained(tmp_path / 'base')
    edit_tensors(tmp_path / 'base', lambda tensors: {**tensors, 'lm_head.weight': torch.randn(131, 36)})
    model = type(base).from_pretrained(tmp_path / 'base').eval()
    assert model.lm_head.weight is not model.shared.weight
    with torch.no_grad():
        for part in (model.encoder, model.decoder):  # transformers 4 leaves those of LongT5 and Switch uninitialised
            part.embed_tokens.weight.copy_(model.shared.weight)
    save_folder(model, tmp_path / 'found')
    model.save_pretrained(tmp_path / 'expected')
    if converts_weights():  # of transformers 4, save_pretrained leaves out embeddings that loading does not restore
        assert_same_folder_tensors(tmp_path / 'found', tmp_path / 'expected')
    assert same_seq2seq_logits(model, loaded(tmp_path / 'found', type(model)))


@pytest.mark.parametrize('name', ['Bart', 'MBart', 'M2M100', 'PLBart', 'NllbMoe', 'Pegasus'])
@pytest.mark.parametrize('is_tied', [True, False])
def test_heads_of_their_own_whose_encoder_and_decoder_share_an_embedding(name, is_tied, tmp_path):
    """transformers 4 does not restore what these classes tie only while they are built."""
    model = with_its_own_head(seq2seq(name, is_tied))
    save_folder(model, tmp_path)
    again = loaded(tmp_path, type(model))
    assert again.config.tie_word_embeddings is False
    assert same_seq2seq_logits(model, again)


class OwnLlama(transformers.LlamaForCausalLM):
    """A class that transformers does not have."""


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """A class that another package changed, as XTuner's Mixtral: its folders load as that of transformers."""


def notes_on(kind: type, **fields: Any) -> list[str]:
    config = build('llama').config
    config.update(fields)
    exporter, placements = planned(kind(config))
    return exporter.check_loading(placements)


def test_a_class_of_ones_own_is_told(monkeypatch):
    """Its folders load where its code is."""
    (note,) = notes_on(OwnLlama)
    assert note.startswith('OwnLlama is a class of tests.') and 'OwnLlama.register_for_auto_class()' in note
    assert notes_on(OwnLlama, auto_map={'AutoModelForCausalLM': 'modeling_own.OwnLlama'}) == []
    monkeypatch.setattr(OwnLlama, '_auto_class', 'AutoModelForCausalLM')
    assert notes_on(OwnLlama) == []
    monkeypatch.setattr(OwnLlama, '_auto_class', None)
    monkeypatch.setattr(OwnLlama, '__module__', '__main__')  # whose code transformers does not save
    (note,) = notes_on(OwnLlama)
    assert 'with the class in a module of its own, and not in the script, OwnLlama.register_for_auto_class()' in note
    assert notes_on(LlamaForCausalLM) == [] and notes_on(transformers.LlamaForCausalLM) == []
