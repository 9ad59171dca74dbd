"""The models and options of which tests/golden has the answers, with weights that are the same on every machine.

Weights do not come from torch's random numbers, which differ between its versions, but from :func:`fill`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.models.adapted import KINDS, adapt, around, is_known_to_peft
from tests.helpers.models.families import MODELS
from tests.helpers.models.zoo import available, build

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Begins the names of cases that need XTuner.
OF_XTUNER = 'xtuner'
REWARD_FAMILIES = ('llama', 'qwen2', 'qwen3', 'mixtral', 'gemma2')
#: Ranks and scales with which all sums of a merge are exact, in whatever order a machine adds up.
EXACT = dict(r=4, lora_alpha=8)
PATTERNS = dict(rank_pattern={'v_proj': 2}, alpha_pattern={'layers.1.self_attn.q_proj': 16})


@dataclass(frozen=True)
class Case:
    """A model to save.

    Attributes:
        make: Makes the model; it may use an empty folder, such as for a base model.
        options: Of ``save_hf``, and the config of the run.
        n_files: If not 1, the weights are split into more files than this.
        needs: What the installed packages must have, if it is more than a transformers version.
        is_exact: Whether the bytes of what is saved are the same on every machine.
        is_coarse: Whether few bits of each weight are used, so that sums are exact.
    """

    make: Callable[[Path], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    n_files: int = 1
    needs: Callable[[], bool] = lambda: True
    is_exact: bool = True
    is_coarse: bool = False


def fill(model: nn.Module, is_coarse: bool = False) -> nn.Module:
    """Give each tensor values that follow from the end of its name, by integer arithmetic.

    Names begin in another way in each version of transformers; so most answers are those of several versions.

    Args:
        is_coarse: Multiples of 1/16 between -1 and 1, instead of 24 bits between -0.5 and 0.5.
    """
    seen: set[int] = set()
    numbers: Counter[str] = Counter()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.is_floating_point() or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        end = '.'.join(name.split('.')[-2:])
        numbers[end] += 1
        values = _values(f'{end} {numbers[end]}', tensor.shape, 1 / 16 if is_coarse else 2.0**-24)
        tensor.data = values.to(tensor.dtype)
    return model


def _values(name: str, shape: torch.Size, step: float) -> torch.Tensor:
    import torch

    mixed = torch.arange(shape.numel(), dtype=torch.int64) + zlib.crc32(name.encode())
    for _ in range(2):  # products stay below 2**63
        mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    n_steps = 32 if step > 0.01 else 2**24
    return ((mixed >> 8) % n_steps - n_steps // 2).mul(2).add(1).double().mul(step / 2).float().view(shape)


def cases() -> Iterator[tuple[str, Case]]:
    """All that the installed transformers has, by name."""
    for family in MODELS:
        if available(family):
            in_parts = dict(options=dict(dtype='bfloat16'), n_files=2)
            yield f'{family} bf16', Case(lambda _, family=family: build(family), **in_parts)
    for family in ('t5', 'umt5', 'deepseek_v3', 'glm4_moe', 'blip_2'):  # with tensors that some dtype leaves in fp32
        if available(family):
            yield f'{family} fp16', Case(lambda _, family=family: build(family), dict(dtype='float16'))
    yield from _adapters()
    yield from _rewards()
    yield from _llavas()
    yield from _bases()
    yield from _exceptions()
    yield from _surroundings()
    yield from _tokenizers()
    yield from _sharded_experts()
    if find_spec('xtuner'):
        yield from _of_xtuner()


def _adapters() -> Iterator[tuple[str, Case]]:
    for kind, (family, lora) in KINDS.items():
        if not available(family):
            continue
        options = {**lora, **EXACT, **(PATTERNS if kind == 'patterns' else {})}

        def make(folder: Path, family: str = family, options: dict[str, Any] = options) -> nn.Module:
            return around(llm=adapt(_of_base(family, folder), **options))

        for mode in ('adapter', 'merge', 'both') if kind == 'plain' else ('adapter', 'merge'):
            needs = lambda kind=kind: is_known_to_peft(kind)  # noqa: E731
            is_exact = mode == 'adapter' or not lora.get('use_dora')
            yield f'lora {kind} {mode}', Case(make, dict(lora=mode), needs=needs, is_exact=is_exact, is_coarse=True)


def _of_base(family: str, folder: Path) -> nn.Module:
    """Loaded from a folder, as what adapters are trained on."""
    model = build(family)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def _rewards() -> Iterator[tuple[str, Case]]:
    from torch import nn

    for family in REWARD_FAMILIES:
        if not available(family):
            continue

        def make(folder: Path, family: str = family, lora: bool = False) -> nn.Module:
            backbone = _of_base(family, folder).model
            head = nn.Linear(backbone.config.hidden_size, 1, bias=False)
            if lora:
                backbone = adapt(backbone, task_type='FEATURE_EXTRACTION', **EXACT)
            return around(llm=backbone, v_head=head)

        yield f'reward {family}', Case(make)
        for mode in ('adapter', 'merge'):
            with_lora = lambda folder, make=make: make(folder, lora=True)  # noqa: E731
            yield f'reward {family} {mode}', Case(with_lora, dict(lora=mode), is_coarse=True)


def _llavas() -> Iterator[tuple[str, Case]]:
    from tests.helpers.models.zoo.llava import TinyLlava, save_bases

    both = {'llm': dict(target_modules='all-linear'), 'visual_encoder': dict(target_modules=['q_proj', 'v_proj'])}
    lora = {part: {**options, **EXACT} for part, options in both.items()}
    kinds: dict[str, dict[str, Any]] = {
        'whole': {},
        'projector': dict(frozen=('llm', 'visual_encoder')),
        'deep': dict(frozen=('visual_encoder',), depth=3, hidden_act='relu'),
        'lora': dict(frozen=('llm', 'visual_encoder'), lora=lora),
    }
    for kind, options in kinds.items():

        def make(folder: Path, options: dict[str, Any] = options) -> nn.Module:
            save_bases(folder)
            return TinyLlava(folder, **options)

        for mode in ('adapter', 'merge', 'both') if kind == 'lora' else (None,):
            chosen = {} if mode is None else dict(lora=mode)
            name = f'llava {kind}' if mode is None else f'llava {kind} {mode}'
            yield name, Case(make, chosen, is_coarse=kind == 'lora')
            if kind != 'deep' and mode in (None, 'merge'):
                yield f'{name} huggingface', Case(make, {**chosen, 'llava_format': 'huggingface'}, is_coarse=True)


def _bases() -> Iterator[tuple[str, Case]]:
    """Models that were loaded from a base."""
    for family in ('mixtral', 'gpt2', 'llava', 'paligemma', 'qwen2_vl', 'qwen3_moe', 'deepseek_v3'):
        if available(family):
            yield f'base {family}', Case(lambda folder, family=family: _of_base(family, folder))
            yield f'base {family} of older names', Case(lambda folder, family=family: _of_older_names(family, folder))
            mixed = lambda folder, family=family: _of_mixed_base(family, folder)  # noqa: E731
            yield f'base {family} dtype', Case(mixed, dict(dtype='base'))
    if available('deepseek_v3'):
        yield 'base carried', Case(_with_more_in_base, dict(carry_base='all'))


def _of_older_names(family: str, folder: Path) -> nn.Module:
    """Of a base as transformers 4 and older named its tensors."""
    from tests.helpers.models.model_folder import rename_tensors
    from xhf_hooks.compat.transformers import converts_weights

    model = build(family)
    model.save_pretrained(folder)
    if family in ('llava', 'paligemma') and converts_weights():
        rename_tensors(folder, 'vision_tower.', 'vision_tower.vision_model.')
    elif family == 'gpt2':
        rename_tensors(folder, 'transformer.', '')
    return type(model).from_pretrained(folder)


def _of_mixed_base(family: str, folder: Path) -> nn.Module:
    """Of a base in bf16 with norms in fp32."""
    import torch

    model = build(family).bfloat16()
    for name, parameter in model.named_parameters():
        if 'norm' in name or 'ln_' in name:
            parameter.data = parameter.data.float()
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, torch_dtype=torch.float32)


def _with_more_in_base(folder: Path) -> nn.Module:
    """Of a base that also has layers for multi-token prediction."""
    import torch

    from tests.helpers.models.model_folder import edit_tensors

    _of_base('deepseek_v3', folder)
    more = {
        f'model.layers.2.{name}': _values(name, torch.Size([3, 5]), 2.0**-24)
        for name in ('enorm.weight', 'eh_proj.weight')
    }
    edit_tensors(folder, lambda tensors: {**tensors, **more})
    return type(build('deepseek_v3')).from_pretrained(folder)


def _exceptions() -> Iterator[tuple[str, Case]]:
    """Models that are not as their config says."""
    for family in ('llama', 'qwen2'):
        yield f'resized {family}', Case(lambda _, family=family: _resized(family))
    yield 'tied against the config', Case(lambda _: _tied())
    yield 'untied against the config', Case(lambda _: _untied())
    yield 'without a pooling layer', Case(lambda _: _encoder('Bert', add_pooling_layer=False))
    yield 'with a mask token', Case(lambda _: _encoder('ViT', add_pooling_layer=False, use_mask_token=True))


def _resized(family: str) -> nn.Module:
    from tests.helpers.models.model_folder import resize_embeddings

    model = build(family)
    resize_embeddings(model, 137)
    return model


def _tied() -> nn.Module:
    model = build('llama')
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _untied() -> nn.Module:
    import copy

    model = build('qwen2')
    model.lm_head.weight = copy.deepcopy(model.lm_head.weight)
    return model


def _encoder(name: str, **arguments: Any) -> nn.Module:
    import transformers

    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=37)
    config = getattr(transformers, f'{name}Config')(vocab_size=131, image_size=8, patch_size=4, **sizes)
    return getattr(transformers, f'{name}Model')(config, **arguments)


def _surroundings() -> Iterator[tuple[str, Case]]:
    """Models in others, and with code of their own."""
    from torch import nn

    beside = lambda _: around(llm=build('llama'), projector=nn.Linear(3, 5))  # noqa: E731
    yield 'beside another module', Case(beside)
    yield 'beside another module alone', Case(beside, dict(module='llm'))
    yield 'in sentences', Case(lambda _: _sentences(build('llama')))
    yield (
        'in sentences lora',
        Case(lambda folder: _sentences(adapt(_of_base('llama', folder), **EXACT)), dict(lora='both'), is_coarse=True),
    )
    yield 'own save', Case(lambda _: _with_own_save())
    yield 'buffers', Case(lambda _: _normed())
    yield 'remote code', Case(_internvl)


def _sentences(model: nn.Module) -> nn.Module:
    from tests.helpers.models.sentences import First, Pooling, Projection, Sentences
    from tests.helpers.models.zoo.llava import tokenizer

    return Sentences(First(model, tokenizer()), Pooling(), Projection(4, 4))


def _with_own_save() -> nn.Module:
    from tests.helpers.models.own_classes import WithMore
    from tests.helpers.models.zoo import small_config

    return WithMore(small_config(*MODELS['llama']))


def _normed() -> nn.Module:
    from tests.helpers.models.zoo.llamas import odd_llama

    return odd_llama(batch_norm=True)


def _internvl(folder: Path) -> nn.Module:
    from tests.helpers.models.zoo.internvl import load_internvl

    return load_internvl(folder / 'internvl')


def _tokenizers() -> Iterator[tuple[str, Case]]:
    """Models of a base with a tokenizer."""
    for name in ('llama_3', 'qwen2', 'llama_2'):
        yield f'tokenizer {name}', Case(lambda folder, name=name: _with_tokenizer(name, folder))


def _with_tokenizer(name: str, folder: Path) -> nn.Module:
    from transformers import LlamaForCausalLM

    from tests.helpers.models import older_bases
    from tests.helpers.models.zoo import small_config

    tokenizer = getattr(older_bases, name)()
    tokenizer.chat_template = older_bases.TEMPLATE
    tokenizer.save_pretrained(folder)
    if name == 'llama_2':
        (folder / 'tokenizer.model').write_bytes(b'sentencepiece')
    config = small_config('LlamaForCausalLM', {**MODELS['llama'][1], 'vocab_size': 340})
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def _sharded_experts() -> Iterator[tuple[str, Case]]:
    """As XTuner 0.2.0 has them, which needs transformers 4."""
    from xhf_hooks.compat.transformers import converts_weights

    if not converts_weights():
        for n_in_shard in (1, 2):
            yield f'sharded {n_in_shard}', Case(lambda _, n=n_in_shard: around(llm=_sharded(n)))


def _sharded(n_in_shard: int) -> nn.Module:
    """A Mixtral whose experts are in shards, as in XTuner's ``ExpertShard``."""
    import torch
    from torch import nn
    from transformers import MixtralForCausalLM

    from tests.helpers.models.zoo import small_config

    class Sharded(MixtralForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if getattr(config, 'moe_implementation', 'origin') != 'shard':
                return
            n_shards = config.num_local_experts // config.expert_in_one_shard
            for layer in self.model.layers:
                layer.block_sparse_moe.experts = nn.ModuleList(self.shard() for _ in range(n_shards))

        def shard(self) -> nn.Module:
            held, rows, columns = (
                self.config.expert_in_one_shard,
                self.config.intermediate_size,
                self.config.hidden_size,
            )
            shard = nn.Module()
            shard.w1w3 = nn.Parameter(torch.empty(held, 2 * rows, columns))
            shard.w2 = nn.Parameter(torch.empty(held, columns, rows))
            return shard

    Sharded.__name__ = 'MixtralForCausalLM'
    config = small_config('MixtralForCausalLM', {**MODELS['mixtral'][1], 'num_local_experts': 4})
    config.moe_implementation, config.expert_in_one_shard = 'shard', n_in_shard
    return Sharded(config)


def _of_xtuner() -> Iterator[tuple[str, Case]]:
    """XTuner's own classes."""
    from tests.e2e.xtuner_stack import classes

    if find_spec('xtuner.model.reward'):
        yield f'{OF_XTUNER} reward', Case(lambda _: _internlm2_reward(), dict(run_config=dict(reward_token_id=130)))
    if find_spec('xtuner.model.transformers_models'):
        for family, n in ((classes.mixtral, 2), (classes.deepseek_v2, 2), (classes.deepseek_v2, 4)):
            yield f'{OF_XTUNER} {family.__name__} {n}', Case(lambda _, family=family, n=n: around(llm=family(n)))
    for layout in ('xtuner', 'huggingface'):
        yield f'{OF_XTUNER} llava {layout}', Case(_llava_of_xtuner, dict(llava_format=layout))


def _internlm2_reward() -> nn.Module:
    from xtuner.model.reward import RewardModel

    from tests.e2e.xtuner_stack.classes import internlm2

    return RewardModel(llm=internlm2())


def _llava_of_xtuner(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM, CLIPVisionModel
    from xtuner.model import LLaVAModel

    from tests.helpers.models.zoo.llava import save_bases

    save_bases(folder)
    parts = AutoModelForCausalLM.from_pretrained(folder / 'llm'), CLIPVisionModel.from_pretrained(folder / 'clip')
    return LLaVAModel(*parts)


def save(case: Case, root: Path) -> Path:
    """Save a case below an empty folder; the folder of the save."""
    import pytest

    from tests.helpers.models.remote_code import use_modules_cache
    from tests.helpers.runs.engines import save_folder
    from xhf_hooks import save_hf

    (root / 'base').mkdir()
    with pytest.MonkeyPatch.context() as patch:
        use_modules_cache(root / 'modules', patch)
        model = fill(case.make(root / 'base'), case.is_coarse)
        options = dict(case.options)
        if case.n_files > 1:
            options['max_shard_size'] = sum(parameter.numel() for parameter in model.parameters()) * 2 // 5
        if 'run_config' in options:
            return save_folder(model, root / 'saved', **options)[1].path
        return save_hf(model, root / 'saved', **options).path
