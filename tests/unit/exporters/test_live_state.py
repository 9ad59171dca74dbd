"""What training changes after the plan was made is saved; what a save leaves out is named."""

import copy
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertForSequenceClassification

from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.models.adapted import Planned, adapted, around, planned
from tests.helpers.models.model_folder import resize_embeddings, save_tokenizer, with_base
from tests.helpers.models.own_classes import CounterConfig, HasWidth, OfTheScript
from tests.helpers.models.zoo import ODD_ENCODER, available, build, small_config
from tests.helpers.runs.engines import Saver, iteration
from xhf_hooks import save_hf
from xhf_hooks.errors import AgreedError
from xhf_hooks.exporters.assets.find_tokenizer import find_tokenizer
from xhf_hooks.exporters.on_meta import build_on_meta
from xhf_hooks.model import module_tensors
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.telemetry import RunLog, warn_of_left_out
from xhf_hooks.runs.unwrap import Unwrapped


def written(exporter: Planned, folder: Path, name: str, tokenizer: Any = None) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    exporter.write_hf_assets(folder, tokenizer, ())
    return json.loads((folder / name).read_text())


def test_what_training_writes_into_the_config(tmp_path):
    """The loss of sequence classifiers sets problem_type at the first step; pipelines choose their function by it."""
    model = BertForSequenceClassification(small_config('BertModel', {**ODD_ENCODER, 'num_labels': 3}))
    exporter = planned(model)
    ids = torch.arange(3, 9)[None]
    model(input_ids=ids, labels=torch.tensor([[1.0, 0.0, 1.0]]))
    model.config.pad_token_id = 7
    config = written(exporter, tmp_path, 'config.json')
    assert (config['problem_type'], config['pad_token_id']) == ('multi_label_classification', 7)


def test_what_training_writes_into_configs_of_adapted_models(tmp_path):
    model = adapted('llama')
    exporter = planned(model, lora='both')
    (tmp_path / 'adapter').mkdir()
    model.get_base_model().config.pad_token_id = 7
    model.get_base_model().generation_config.top_k = 7
    model.peft_config['default'] = copy.copy(model.peft_config['default'])
    model.peft_config['default'].lora_alpha = 99
    assert written(exporter, tmp_path, 'config.json')['pad_token_id'] == 7
    assert written(exporter, tmp_path, 'generation_config.json')['top_k'] == 7
    assert written(exporter, tmp_path, 'adapter/adapter_config.json')['lora_alpha'] == 99
    assert model.peft_config['default'].inference_mode is False


SPEECH = ['CsmForConditionalGeneration', 'KyutaiSpeechToTextForConditionalGeneration']


@pytest.mark.modern_only  # transformers 4.48 has none of them
@pytest.mark.parametrize('name', [name for name in SPEECH if hasattr(transformers, name)])
def test_generation_settings_of_parts(name, tmp_path):
    """These classes override save_pretrained, to save the settings of a part with those of the model."""
    kind = getattr(transformers, name)
    model = build_on_meta(kind, kind.config_class())
    part, prefix = (model.depth_decoder, 'depth_decoder') if 'Csm' in name else (model.codec_model, 'codec')
    part.generation_config.do_sample, part.generation_config.temperature = True, 0.33
    before = model.generation_config.to_dict()
    found = written(planned(model), tmp_path, 'generation_config.json')
    assert found[f'{prefix}_temperature'] == 0.33 and found[f'{prefix}_do_sample'] is True
    assert model.generation_config.to_dict() == before


@pytest.mark.modern_only
def test_layers_that_the_base_announces_and_the_class_does_not_load(tmp_path):
    """Such as those for multi-token prediction of DeepSeek-V3 and GLM-4.5."""
    if not available('deepseek_v3'):
        pytest.skip('not in this transformers')
    for number, n_warnings in ((1, 1), (0, 0)):
        model = with_base(build('deepseek_v3'), tmp_path / 'base')
        config = json.loads((tmp_path / 'base' / 'config.json').read_text())
        (tmp_path / 'base' / 'config.json').write_text(json.dumps({**config, 'num_nextn_predict_layers': number}))
        warnings = planned(model).write_hf_assets(tmp_path, None, ())
        assert len(warnings) == n_warnings and all('num_nextn_predict_layers=1' in warning for warning in warnings)


# Tokenizers


@pytest.fixture
def llama(tmp_path):
    """A model with a base that has a tokenizer."""
    model = with_base(build('llama'), tmp_path / 'base')
    save_tokenizer(tmp_path / 'base', model.config.vocab_size)
    return model


def grown(model: Any) -> tuple[Any, Any]:
    """The base's tokenizer with a token more, and the model with a row for it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.config._name_or_path)
    tokenizer.add_tokens(['[SEG]'], special_tokens=True)
    resize_embeddings(model, len(tokenizer))
    return tokenizer, model


def test_the_models_own_tokenizer_goes_before_a_recipe(llama):
    """Models such as Sa2VA add tokens to their own; what the run's config names is what they started from."""
    tokenizer, llm = grown(llama)
    model = around(llm=llm)
    model.tokenizer = tokenizer
    base = llm.config._name_or_path
    recipe = dict(type='transformers.AutoTokenizer.from_pretrained', pretrained_model_name_or_path=base)
    exporter = planned(model)
    for given in (recipe, None):
        assert find_tokenizer(None, given, exporter, model) == (tokenizer, [])
    other = transformers.AutoTokenizer.from_pretrained(base)
    assert find_tokenizer(None, other, exporter, model)[0] is other  # of the run itself
    assert len(find_tokenizer(base, recipe, exporter, model)[0]) == len(other)  # of the option


def test_tokens_that_the_tokenizer_lacks(llama, tmp_path):
    base = transformers.AutoTokenizer.from_pretrained(llama.config._name_or_path)
    tokenizer, model = grown(llama)
    (tmp_path / 'found').mkdir()
    exporter = planned(model)
    assert exporter.write_hf_assets(tmp_path / 'found', tokenizer, ()) == []
    (warning,) = exporter.write_hf_assets(tmp_path / 'found', base, ())
    assert f'the tokenizer has {len(base)} tokens' in warning and f'from 131 to {len(tokenizer)} rows' in warning
    assert 'option tokenizer' in warning


@pytest.mark.parametrize('rows', [131, 192])
def test_padded_embeddings_are_right(rows, llama, tmp_path):
    """Of the base, as Qwen's; and resized for more tokens than those."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama.config._name_or_path)
    n_more = rows - len(tokenizer) - 5
    tokenizer.add_tokens([f'[{number}]' for number in range(max(0, n_more))])
    resize_embeddings(llama, rows)
    (tmp_path / 'found').mkdir()
    assert planned(llama).write_hf_assets(tmp_path / 'found', tokenizer, ()) == []


@pytest.mark.modern_only
@pytest.mark.skipif(not available('mllama'), reason='this transformers has no Llama 3.2 Vision')
@pytest.mark.parametrize('lora', [None, 'adapter'])
def test_embeddings_of_images_beside_those_of_tokens(lora, tmp_path):
    """Llama 3.2 Vision has 8 rows more than vocab_size, of which its tokenizer names one; its head has none of them."""
    model = with_base(build('mllama'), tmp_path / 'base')
    rows = model.config.text_config.vocab_size
    save_tokenizer(tmp_path / 'base', rows + 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'base')
    assert model.get_input_embeddings().weight.shape[0] > len(tokenizer) > rows
    whole = model if lora is None else get_peft_model(model, LoraConfig(target_modules=['q_proj']))
    warnings = planned(whole, **({} if lora is None else {'lora': lora})).write_hf_assets(tmp_path, tokenizer, ())
    assert [warning for warning in warnings if 'embeddings' in warning] == []


# What has no place in the folder


OF_CRITIC = 'critic.cls.predictions.transform.dense'


def critic() -> nn.Module:
    """Another model of transformers than the exported one, of which training changes two tensors."""
    model = build('bert').requires_grad_(False)
    model.cls.predictions.transform.dense.requires_grad_(True)
    return model


@pytest.mark.parametrize('lora', [True, False])
def test_trained_tensors_that_are_not_saved_are_named(lora, caplog):
    model = around(llm=adapted('llama') if lora else build('llama'), critic=critic(), frozen=nn.Linear(3, 3))
    model.frozen.requires_grad_(False)
    exporter, log = planned(model), RunLog(logging.getLogger('test_left_out'), 'Door')
    for _ in range(2):
        warn_of_left_out(log, exporter.left_out, model)
    (message,) = caplog.messages
    assert caplog.records[0].levelname == 'WARNING' and 'docs/extending.md' in message
    assert f'trained, but not saved: 2 tensors ({OF_CRITIC}.weight, {OF_CRITIC}.bias)' in message
    model.frozen.requires_grad_(True)
    warn_of_left_out(log, exporter.left_out, model)
    assert 'trained, but not saved: 4 tensors' in caplog.messages[-1]


@pytest.mark.parametrize('lora', [True, False])
def test_every_save_tells_of_them(lora, tmp_path, caplog):
    """Frozen ones are a remark; nothing is said of an adapter's base."""
    caplog.set_level(logging.INFO)
    llm = adapted('llama') if lora else build('llama')
    model = around(llm=llm, critic=critic(), frozen=nn.Linear(3, 3), mask_head=nn.Linear(3, 3))
    model.frozen.requires_grad_(False)
    save_hf(model, tmp_path / 'saved', **{'lora': 'adapter'} if lora else {})
    (left_out,) = [message for message in caplog.messages if message.startswith('save_hf: not exported: ')]
    assert 'critic.bert.embeddings.' in left_out and 'mask_head' not in left_out and 'llm.' not in left_out
    told = 'save_hf: trained outside of the exported model: 2 tensors (mask_head.bias, mask_head.weight), saved to '
    assert f'{told}other_modules/model.safetensors' in caplog.messages
    (record,) = [record for record in caplog.records if 'trained, but not saved' in record.getMessage()]
    assert record.levelname == 'WARNING' and f'{OF_CRITIC}.weight' in record.getMessage()


def test_of_averaged_weights_what_the_live_model_trains_is_told(tmp_path, caplog, monkeypatch):
    """EMAHook's copy of the model, which is saved, is frozen as a whole."""
    model = around(llm=build('llama'), critic=critic())
    averaged = copy.deepcopy(model).requires_grad_(False)
    monkeypatch.setattr('xhf_hooks.integrations.own_loop.unwrap', lambda model: Unwrapped(model, averaged))
    save_hf(model, tmp_path / 'saved')
    (told,) = [message for message in caplog.messages if 'trained, but not saved' in message]
    assert f'2 tensors ({OF_CRITIC}.weight, {OF_CRITIC}.bias)' in told


class DrawsNumbers(OfTheScript):
    """As XTuner's InternVL: it reads values while it is built, so that it is built on the CPU."""

    def __init__(self, config: CounterConfig) -> None:
        super().__init__(config)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.embedding = nn.Parameter(torch.randn(1, 8))
        self.order = np.random.permutation(4)
        self.share = random.random()
        self.post_init()


class WithExtraState(nn.Module):
    """As modules of TransformerEngine."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.state = torch.tensor([1.0, 2.0])

    def get_extra_state(self) -> torch.Tensor:
        return self.state

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.state = state


class HasExtraState(OfTheScript):
    def __init__(self, config: CounterConfig) -> None:
        super().__init__(config)
        self.part = WithExtraState()
        self.post_init()


class HasTeacher(OfTheScript):
    def __init__(self, config: CounterConfig) -> None:
        super().__init__(config)
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        self.post_init()

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {name: tensor for name, tensor in super().state_dict(*args, **options).items() if 'teacher' not in name}


def test_generators_of_random_numbers_stay_where_they_are(tmp_path):
    model = DrawsNumbers(CounterConfig())
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    save_hf(model, tmp_path / 'saved')
    assert torch.equal(torch.get_rng_state(), of_torch) and random.getstate() == of_python
    now = np.random.get_state()
    assert np.array_equal(now[1], of_numpy[1]) and now[2:] == of_numpy[2:]


@pytest.mark.parametrize('kind', [HasExtraState, HasTeacher])
def test_what_is_saved_is_what_state_dict_lists(kind, tmp_path):
    model = kind(CounterConfig())
    if kind is HasExtraState:
        model.part.state = torch.tensor([7.0, 8.0])
    save_hf(model, tmp_path / 'saved')
    model.save_pretrained(tmp_path / 'expected')
    assert_same_folder_tensors(tmp_path / 'saved', tmp_path / 'expected')
    if kind is HasExtraState:
        assert kind.from_pretrained(tmp_path / 'saved').part.state.tolist() == [7.0, 8.0]


@pytest.mark.parametrize('lora', [None, 'merge', 'both'])
@pytest.mark.parametrize('is_tied', [True, False])
def test_a_class_that_its_config_alone_does_not_build(is_tied, lora, tmp_path, caplog):
    caplog.set_level('INFO', 'xhf_hooks')
    model = HasWidth(CounterConfig(tie_word_embeddings=is_tied), 8)
    trained = model
    if lora is not None:
        trained = get_peft_model(model, LoraConfig(r=2, target_modules=['q_proj'], modules_to_save=['norm']))
        trained.base_model.model.q_proj.lora_B['default'].weight.data += 0.5
        trained.base_model.model.norm.modules_to_save['default'].weight.data += 0.5
    before = {name: (id(tensor), tensor.tolist()) for name, tensor in module_tensors(trained)}
    save_hf(trained, tmp_path / 'saved', **({} if lora is None else {'lora': lora}))
    assert {name: (id(tensor), tensor.tolist()) for name, tensor in module_tensors(trained)} == before
    assert 'could not check in advance that saves will load: HasWidth: TypeError' in caplog.text
    assert "'width'" in caplog.text
    expected = model if lora is None else copy.deepcopy(trained).merge_and_unload()
    expected.save_pretrained(tmp_path / 'expected')
    assert_same_folder_tensors(tmp_path / 'saved', tmp_path / 'expected')
    loaded = HasWidth.from_pretrained(tmp_path / 'saved', width=8)
    ids = torch.arange(6)[None]
    assert torch.allclose(loaded(ids), trained(input_ids=ids), atol=1e-4)


@pytest.mark.parametrize('change', ['vocab_size', 'id2label'])
def test_a_config_that_is_edited_while_training(change, tmp_path):
    """Whether the folder loads depends on it: then the save is planned and shown to load again."""
    kind = 'LlamaForCausalLM' if change == 'vocab_size' else 'LlamaForSequenceClassification'
    config = build('llama').config
    config.num_labels = 3
    model = getattr(transformers, kind)(config)
    resize_embeddings(model, 192)
    collective = Collective.connect()
    saver, target = Saver(model, collective), CheckpointFolder(tmp_path / 'saved', max_keep=1)
    target.lock_and_recover()
    if change == 'vocab_size':
        model.config.vocab_size = 133
        saver.save(target, iteration(1))
        again, told = type(model).from_pretrained(tmp_path / 'saved', output_loading_info=True)
        assert not told['missing_keys'] and not told['mismatched_keys'] and again.config.vocab_size == 192
    else:
        model.config.id2label = {0: 'no', 1: 'yes'}
        with pytest.raises(AgreedError, match=r'score.weight \(3, (\d+)\), expected \(2, \1\)'):
            saver.save(target, iteration(1))
    target.unlock()
    saver.close()
    collective.close()
