"""Builds a model from a folder like transformers and peft, but on the meta device and without weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xhf_hooks.compat.transformers import ROPE_OPTIONS, set_rope_option, text_config
from xhf_hooks.errors import BaseModelError, ConfigError, DamagedError
from xhf_hooks.exporters.assets.base_files import find_base_file, find_base_folder
from xhf_hooks.exporters.class_arguments import find_arguments
from xhf_hooks.exporters.loading_check import Problems, differences
from xhf_hooks.exporters.on_meta import call_on_meta
from xhf_hooks.format.loaded_files import CONFIG, GENERATION_CONFIG
from xhf_hooks.format.text import refused_as
from xhf_hooks.model import input_embedding, module_tensors, names_by_identity, output_embedding, token_embeddings
from xhf_hooks.offline.model.stored_names import name_in_base
from xhf_hooks.sources.stored_tensors import StoredTensor, is_same_value

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

#: Fields of the config that an argument of ``from_pretrained`` does not set, or that an untrusted one must not.
_NOT_FIELDS = ('auto_map', 'torch_dtype', 'dtype', 'name_or_path', 'quantization_config', 'architectures', 'use_cache')
#: Arguments of ``from_pretrained`` that are no fields, and change nothing that is written.
_OF_LOADING = (
    'attn_implementation', 'cache_dir', 'code_revision', 'config', 'device_map', 'force_download',
    'ignore_mismatched_sizes', 'load_in_4bit', 'load_in_8bit', 'local_files_only', 'low_cpu_mem_usage', 'max_memory',
    'offload_folder', 'pretrained_model_name_or_path', 'resume_download', 'revision', 'subfolder', 'token',
    'trust_remote_code', 'type', 'use_auth_token', 'use_flash_attention_2', 'use_safetensors', 'variant',
)  # fmt: skip
#: The remedy where the model that training started from is not found.
NAME_BASE = '--base has to name a folder with the model that training started from'
#: Of peft (``AutoPeftModelFor...`` in ``auto.py``).
_CLASSES_OF_TASKS = {
    'CAUSAL_LM': 'AutoModelForCausalLM',
    'SEQ_2_SEQ_LM': 'AutoModelForSeq2SeqLM',
    'SEQ_CLS': 'AutoModelForSequenceClassification',
    'TOKEN_CLS': 'AutoModelForTokenClassification',
    'QUESTION_ANS': 'AutoModelForQuestionAnswering',
    'FEATURE_EXTRACTION': 'AutoModel',
}


def load_config(base: str, *, trust_remote_code: bool, why: str, remedy: str = NAME_BASE) -> PretrainedConfig:
    """The config of the model at ``base``, a folder or a name in the local hub cache. Offline.

    Args:
        why: Where ``base`` comes from, for messages.
        remedy: The remedy to name if the folder is not there.

    Raises:
        BaseModelError: It is missing, or needs custom code.
    """
    from transformers import AutoConfig

    if find_base_folder(base) is None and not Path(base).is_absolute():
        raise BaseModelError(
            f'{base} ({why}): is not in the hub cache, and nothing is downloaded: hf download {base}, or give a folder '
            f'that has it; {remedy}'
        )
    with refused_as(BaseModelError, f'{base} ({why}): no usable config.json', remedy):
        if find_base_file(base, CONFIG) is None:  # transformers < 5 guesses the model from the folder's name
            raise FileNotFoundError('there is no such file')
        return AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=trust_remote_code)


def apply_options(config: PretrainedConfig, options: Mapping[str, Any]) -> list[str]:
    """Apply arguments of ``from_pretrained`` that are fields of the config, such as ``rope_scaling``.

    Returns:
        Names of the options that are neither fields nor of loading.
    """
    unknown = []
    for name, value in options.items():
        if name in ROPE_OPTIONS and set_rope_option(config, name, value):
            continue
        known = hasattr(config, name) and not name.startswith('_')
        is_plain = isinstance(value, (str, int, float, bool, dict, list, type(None)))
        if known and is_plain and name not in _NOT_FIELDS:
            setattr(config, name, value)
        elif not known and name not in (*_OF_LOADING, *_NOT_FIELDS):
            unknown.append(name)
    return unknown


def build(
    config: PretrainedConfig,
    auto_class: str | None,
    *,
    trust_remote_code: bool,
    arguments: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Build the model on the meta device, with the base's generation config, as ``from_pretrained`` does.

    Args:
        auto_class: Auto class such as ``'AutoModelForCausalLM'``, or model class; None: the config's ``architectures``.
        arguments: Keyword arguments of the model class besides the config.

    Raises:
        BaseModelError: transformers does not have the model.
        DamagedError: transformers cannot build it from this config.
    """
    import transformers

    base = config._name_or_path
    name = auto_class or first_architecture(getattr(config, 'architectures', None))
    kind = class_named(name)
    remote = trust_remote_code and bool(getattr(config, 'auto_map', None))
    if kind is None and not remote:
        raise BaseModelError(
            f'{base}: its config.json names the architecture {str(name)[:80]!r}, which transformers '
            f'{transformers.__version__} does not have; name the class with --architecture, or use the version that '
            f'trained it'
        )
    with refused_as(DamagedError, f'{base}: building the model of config.json failed'):
        if kind is None:
            kind = getattr(transformers, next((a for a in config.auto_map if a.startswith('AutoModel')), 'AutoModel'))
        is_auto = hasattr(kind, 'from_config')
        make = partial(kind.from_config, trust_remote_code=remote) if is_auto else partial(kind, **(arguments or {}))
        # Not build_on_meta: the config of this model is exported, and may have nothing that is for building alone
        model = call_on_meta(lambda: make(copy.deepcopy(config)))
        model.tie_weights()  # transformers 5.0 leaves that to from_pretrained
        config.to_json_string()  # as is done when the weights are written
        if model.can_generate() and find_base_file(base, GENERATION_CONFIG) is not None:
            model.generation_config = generation_config_in(base)
    if (folder := find_base_folder(base)) is not None and not Path(base).is_dir():
        model.config._commit_hash = folder.name  # a hub name without a revision means the main one
    return model


def build_fitting(
    config: PretrainedConfig,
    auto_class: str | None,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    trust_remote_code: bool,
    arguments: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Build the model with as many tokens and labels as the checkpoint has rows for, and edit the config to that.

    Args:
        auto_class, arguments: As of :func:`build`.
        shapes: As of :func:`fit_config`.
    """
    make = partial(build, config, auto_class, trust_remote_code=trust_remote_code, arguments=arguments)
    model = make()
    return make() if fit_config(config, model, shapes) else model


def arguments_of(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The arguments of a model's class that leave out what the checkpoint lacks, such as ``add_pooling_layer=False``.

    Args:
        model: As its class builds it without arguments.
        stored: All of the model's tensors in the checkpoint, by name in the model.

    Returns:
        The arguments; none if no arguments give exactly these tensors.
    """
    shapes = {name: tensor.shape for name, tensor in stored.items()}

    def differences_of(built: nn.Module) -> Problems:
        return differences(shapes, {name: tuple(tensor.shape) for name, tensor in module_tensors(built)})

    def differences_with(arguments: Mapping[str, Any]) -> Problems:
        name = type(model).__name__
        built = build(copy.deepcopy(model.config), name, trust_remote_code=False, arguments=arguments)
        return differences_of(built)

    if type(model) is not class_named(type(model).__name__) or shapes.keys() >= dict(module_tensors(model)).keys():
        return {}
    return find_arguments(type(model), differences_of(model), differences_with) or {}


def generation_config_in(folder: str) -> GenerationConfig:
    """Read the ``generation_config.json`` of a folder, or of a name in the local hub cache."""
    from transformers import GenerationConfig

    with refused_as(BaseModelError, f'{folder}: its generation_config.json cannot be loaded'):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def first_architecture(architectures: Any) -> str | None:
    """The first name in ``architectures`` of an untrusted config."""
    found = architectures[0] if isinstance(architectures, (list, tuple)) and architectures else None
    return found if isinstance(found, str) else None


def without_wrapper(name: str | None) -> str | None:
    """The name of a class without what ``fully_shard`` adds to it, which Trainer writes to ``config.json``.

    Source: ``torch/distributed/fsdp/_fully_shard/_fully_shard.py``, ``fully_shard``.
    """
    plain = (name or '').removeprefix('FSDP')
    return plain if class_named(name) is None and class_named(plain) is not None else name


def class_named(name: str | None) -> Any | None:
    """The model class or auto class of this name in transformers; None if it has no such class.

    Raises:
        BaseModelError: It cannot be imported.
    """
    import transformers
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    if name is None or not name.isidentifier():
        return None
    with refused_as(BaseModelError, f'{name[:80]} cannot be imported'):  # usually a missing package
        found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(found, (transformers.PreTrainedModel, _BaseAutoModelClass))
    return found if is_model else None


def config_of_class(kind: Any, config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that a class takes: that of the text model, if the class is of that; else the whole.

    Args:
        kind: A model class or auto class; None if it is not known.
    """
    text, wanted = text_config(config), getattr(kind, 'config_class', None)
    if wanted is None or isinstance(config, wanted) or not isinstance(text, wanted):
        return config
    text._name_or_path = config._name_or_path
    return text


def class_for_adapter(lora: PeftConfig, config: PretrainedConfig) -> str | None:
    """The class onto which peft loads an adapter: of its task, or the one that its ``auto_mapping`` names.

    Language models are of the class that the base's config names if that generates: many kinds of models are trained
    with the task CAUSAL_LM, for which transformers has no class of theirs.
    """
    import transformers

    of_base = first_architecture(getattr(config, 'architectures', None))
    task = getattr(lora.task_type, 'value', lora.task_type)
    if task is None:
        named = lora.auto_mapping.get('base_model_class') if isinstance(lora.auto_mapping, dict) else None
        return named if isinstance(named, str) and class_named(named) else of_base
    of_task = _CLASSES_OF_TASKS.get(task)
    kind = class_named(of_base)
    generates = kind is not None and hasattr(kind, 'can_generate') and kind.can_generate()
    if of_task is None or (generates and task in ('CAUSAL_LM', 'SEQ_2_SEQ_LM')):
        return of_base
    is_named = of_task in (getattr(config, 'auto_map', None) or {})
    return of_task if is_named or classes_of(getattr(transformers, of_task), config) else of_base


def fit_config(config: PretrainedConfig, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Edit the config for the vocabulary and the labels of trained tensors; returns whether it was edited.

    What has a row for each token is the input embedding; of models of sound, which have none, the head of CTC models.

    Args:
        shapes: Of the trained tensors by name. Names may have a prefix, and components of peft's wrappers.
    """
    trained = {f'.{name_in_base(name)}': shape for name, shape in shapes.items()}
    embedding, n_labels = input_embedding(model), getattr(config, 'num_labels', None)
    if embedding is None and len(token_embeddings(model)) == 1:  # custom code that does not say which
        embedding = token_embeddings(model)[0]
    n_tokens = getattr(text_config(config), 'vocab_size', None) if embedding is None else None
    n_more_tokens, has_edited = 0, False
    for tensor, names in names_by_identity(model):
        rows, row = tensor.shape[:1], tensor.shape[1:]
        if tensor is not embedding and rows not in ((n_labels,), (n_tokens,)):
            continue
        ends = tuple(f'.{name}' for name in names)
        found = {shape for there, shape in trained.items() if there.endswith(ends)}
        wanted = {shape[0] for shape in found if shape[1:] == row}.difference(rows)
        if len(wanted) != 1:
            continue
        if tensor is embedding or rows != (n_labels,):
            n_more_tokens = wanted.pop() - rows[0]
        else:
            config.num_labels = wanted.pop()
        has_edited = True
    if n_more_tokens:
        _change_vocabulary(config, n_more_tokens)
    return has_edited


def other_version_remedy(models: Sequence[nn.Module]) -> str:
    """The remedy if names differ although the base is right, to continue a message: training had another version.

    Args:
        models: As they were built from the configs of their bases.
    """
    import transformers

    installed = transformers.__version__
    wrote = {getattr(getattr(model, 'config', None), 'transformers_version', None) for model in models}
    versions = sorted(version for version in wrote if isinstance(version, str) and version != installed)
    which = f"{versions[0]}', which wrote its config.json" if versions else "VERSION'"
    return (
        f'. If it does, the names in the checkpoint are of another transformers than {installed}: pip install '
        f"'transformers=={which}, or convert where the run was trained; or they are a trainer's own, as of torchtitan, "
        f'Megatron and LitGPT: first export with it to Hugging Face'
    )


def untie_embeddings(config: PretrainedConfig, model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> bool:
    """Edit the config of tied embeddings if training had them apart; returns whether it was edited.

    Older versions did not tie what newer ones tie for the same config.

    Args:
        stored: The trained tensors, by each of their names in the model.
    """
    embedding = input_embedding(model)
    if embedding is None or output_embedding(model) is not embedding:
        return False
    names = next((names for tensor, names in names_by_identity(model) if tensor is embedding), [])
    matching = list(dict.fromkeys(stored[name] for name in names if name in stored))
    if all(is_same_value(matching[0], other) for other in matching[1:]):
        return False
    for part in (config, text_config(config)):
        part.tie_word_embeddings = False
    return True


def _change_vocabulary(config: PretrainedConfig, n_more: int) -> None:
    """Encoder and decoder may have fields of their own for the vocabulary that they share, as in Marian."""
    text = text_config(config)
    parts = [part for part in vars(config).values() if hasattr(part, 'model_type') and hasattr(part, 'vocab_size')]
    if not hasattr(text, 'vocab_size') and len(parts) == 1:  # of custom code: InternVL's llm_config
        text = parts[0]
    size = getattr(text, 'vocab_size', None)
    if type(size) is int:
        same_size = [name for name, value in vars(text).items() if name.endswith('_vocab_size') and value == size]
        for name in ('vocab_size', *same_size):
            setattr(text, name, size + n_more)
        if vars(config).get('vocab_size') == size:  # LLaVA's of transformers 4.36 has that of its text model, too
            config.vocab_size = size + n_more


def lora_config_of(options: Mapping[str, Any], where: str) -> PeftConfig:
    """peft's LoraConfig from the options in a run's config."""
    from peft import LoraConfig

    kind = str(options.get('type', ''))
    if kind.rpartition('.')[2] != 'LoraConfig':
        raise ConfigError(f'{where}: lora has type {kind or "none"}; only LoraConfig can be converted')
    with refused_as(ConfigError, f'{where}: peft refuses the options of lora'):
        return LoraConfig(**{name: value for name, value in options.items() if name != 'type'})


def adapter_config_in(folder: Path) -> PeftConfig:
    """Read the ``adapter_config.json`` in a folder."""
    from peft import LoraConfig, PeftConfig

    with refused_as(ConfigError, f'{folder}/adapter_config.json: peft cannot read it'):
        found = PeftConfig.from_pretrained(str(folder), local_files_only=True)
    if not isinstance(found, LoraConfig):
        kind = getattr(found.peft_type, 'value', found.peft_type)
        raise ConfigError(f'{folder}/adapter_config.json: peft_type is {kind}; only LORA can be converted')
    return found


def adapt(model: PreTrainedModel, lora: PeftConfig) -> PeftModel:
    """Add an untrained adapter to ``model``.

    Without ``target_modules``, all linear layers but the head are adapted, as a run's ``find_all_linear_names`` does.
    """
    from peft import get_peft_model

    wanted = copy.copy(lora)
    wanted.inference_mode = False
    if getattr(wanted, 'megatron_config', None) is not None:
        wanted.megatron_config = None  # else peft imports the module that megatron_core names
    if wanted.target_modules is None:
        linear = {name.rpartition('.')[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        wanted.target_modules = linear - {'lm_head', 'output_layer'}
    wanted.init_lora_weights = False  # there are no weights to initialise or decompose
    with refused_as(ConfigError, f'peft cannot adapt a {type(model).__name__} as configured'), torch.device('meta'):
        adapted = get_peft_model(model, wanted)
    for config in adapted.peft_config.values():
        config.init_lora_weights = lora.init_lora_weights
        if config.modules_to_save is not None:  # to which peft adds the classifiers, even if they are there
            config.modules_to_save = list(dict.fromkeys(config.modules_to_save))
    return adapted


def classes_of(auto_class: Any, config: PretrainedConfig) -> list[type[PreTrainedModel]]:
    """The classes that an auto class of transformers has for a config; none if it is no such class."""
    mapping = getattr(auto_class, '_model_mapping', None)
    kinds = [] if mapping is None else mapping.get(type(config), [])
    return list(kinds) if isinstance(kinds, (list, tuple)) else [kinds]
