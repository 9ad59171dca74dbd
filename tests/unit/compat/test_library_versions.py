"""What old and new versions of other libraries need of this package, each shown with what those versions have."""

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from torch import nn

from xhf_hooks.compat import deepspeed, peft, transformers
from xhf_hooks.compat.huggingface_hub import split_into_files

NBYTES = {'a': 3, 'b': 3, 'c': 9, 'd': 1, 'e': 6}


def split(most_nbytes):
    return split_into_files(NBYTES, 'model{suffix}.safetensors', most_nbytes)


def test_a_split_without_the_hubs_function(monkeypatch):
    """huggingface_hub before 0.21."""
    monkeypatch.setattr(huggingface_hub, 'split_state_dict_into_shards_factory', None, raising=False)
    found, alone = split(7), split(100)
    first, second, third = (f'model-0000{number}-of-00003.safetensors' for number in (1, 2, 3))
    assert found == {first: ['a', 'b'], second: ['c'], third: ['d', 'e']}
    assert alone == {'model.safetensors': [*NBYTES]}


def _since_024(state_dict, *, get_storage_size, get_storage_id, filename_pattern, max_shard_size):
    return SimpleNamespace(filename_to_tensors={name: [get_storage_size(item)] for name, item in state_dict.items()})


def _since_021(state_dict, *, get_tensor_size, get_storage_id, filename_pattern, max_shard_size):
    return SimpleNamespace(filename_to_tensors={name: [get_tensor_size(item)] for name, item in state_dict.items()})


@pytest.mark.parametrize('factory', [_since_021, _since_024])
def test_a_split_under_each_name_of_the_hubs_argument(factory, monkeypatch):
    """huggingface_hub 0.21 to 0.23, and newer ones."""
    monkeypatch.setattr(huggingface_hub, 'split_state_dict_into_shards_factory', factory, raising=False)
    assert split(7) == {name: [nbytes] for name, nbytes in NBYTES.items()}


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)


class Mixin:
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(1, 1)


class Head(Mixin, Inner):
    """Inherits its ``__init__``, as LlamaForSequenceClassification of transformers 4.57."""


@pytest.fixture
def after_zero_init():
    """What ``deepspeed.zero.Init`` of 0.16 leaves behind (``_enable_class`` and ``_disable_class``)."""
    Inner._old_init = Inner.__init__
    Head.__init__ = Head._old_init
    yield
    del Inner._old_init
    if '__init__' in vars(Head):
        del Head.__init__


def test_a_class_that_inherits_its_init_is_built_whole(after_zero_init):
    assert not hasattr(Head(), 'score'), 'what DeepSpeed leaves behind'
    deepspeed.restore_inherited_init(Head)
    deepspeed.restore_inherited_init(Inner)  # has its own, and keeps it
    assert hasattr(Head(), 'score') and hasattr(Head(), 'layer')


@pytest.mark.parametrize(('version', 'n_steps'), [((0, 13, 1), 1), ((0, 13, 5), 0), ((0, 19, 6), 0), (None, 0)])
def test_steps_that_an_optimizer_made_before_training(version, n_steps):
    assert deepspeed.n_steps_before_training(version) == n_steps


def test_doras_magnitudes_under_both_names():
    """A parameter before peft 0.12, a module's since."""
    assert peft.magnitude_name('q', 'default', {'q.lora_magnitude_vector.default'}) == 'q.lora_magnitude_vector.default'
    assert peft.magnitude_name('q', 'default', set()) == 'q.lora_magnitude_vector.default.weight'


def test_the_text_models_config_without_the_method():
    """transformers before 4.45."""

    class Config:
        text_config = 'text'

    class Several:
        decoder, generator, text_config = 'decoder', None, 'text'

    assert transformers.text_config(Config()) == 'text'
    several, plain = Several(), object()
    assert transformers.text_config(several) is several and transformers.text_config(plain) is plain


#: Names, most of them private, that the package asks for and does without if they are gone, so that no save would
#: fail: the module whose source has them in the newest versions. (A save of another test fails when one of the other
#: names goes.)
ASKED_FOR = {
    '_weight_conversions': 'transformers.core_model_loading',
    '_keys_to_ignore_on_load_missing': 'transformers.modeling_utils',
    '_keys_to_ignore_on_load_unexpected': 'transformers.modeling_utils',
    '_keys_to_ignore_on_save': 'transformers.modeling_utils',
    '_LEGACY_LAYER_TYPE_REMAP': 'transformers.configuration_utils',
    'check_dims': 'transformers.core_model_loading',
    'prefix_to_remove': 'transformers.core_model_loading',
    'rename_source_key': 'transformers.core_model_loading',
    '_keep_in_fp32_modules': 'transformers.modeling_utils',
    '_keep_in_fp32_modules_strict': 'transformers.modeling_utils',
    '_tied_weights_keys': 'transformers.modeling_utils',
    '_auto_class': 'transformers.modeling_utils',
    '_model_mapping': 'transformers.models.auto.auto_factory',
    '_hf_deepspeed_config_weak_ref': 'transformers.integrations.deepspeed',
    '_did_swap_in_out_features': 'peft.tuners.lora.layer',
    '_orig_mod': 'torch._dynamo.eval_frame',
    '_orig_cls_mro_index': 'torch.distributed.fsdp._fully_shard._fully_shard',
    '_local_shard': 'torch.distributed.fsdp._flat_param',
    '_hp_mapping': 'deepspeed.utils.mixed_precision_linkage',
    '_z3_optimizer': 'deepspeed.runtime.zero.stage3',
    '_register_atexit': 'threading',
    '_set_pg_timeout': 'torch.distributed.distributed_c10d',
    'split_state_dict_into_shards_factory': 'huggingface_hub.serialization._base',
}


@pytest.mark.modern_only
@pytest.mark.skipif(not transformers.converts_weights(), reason='for the newest versions')
@pytest.mark.parametrize(('name', 'module'), ASKED_FOR.items())
def test_private_names_that_are_asked_for(name, module):
    """If one of them goes, what stands in its place must be looked at again (xhf_hooks/compat)."""
    source = Path(find_spec(module).origin).read_text(encoding='utf-8')
    assert re.search(rf'\b{name}\b', source)
