"""Runs `xtuner train` with configs/xtuner, made small enough for a CPU, and finds what the runs left."""

import gc
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import transformers

from tests.e2e.xtuner_stack.base_models import (
    FAMILIES,
    INTERNLM2_CODE,
    make_base_model,
    make_datasets,
    make_internlm2,
    make_internvl_base,
    make_llava,
)
from tests.helpers.ranks.launch import REPO_ROOT, RankFailures, python_path, run_ranks


def _xtuner() -> str:
    (folder,) = find_spec('xtuner').submodule_search_locations
    return folder


HERE = Path(__file__).parent
CONFIGS = REPO_ROOT / 'configs' / 'xtuner'
SHIPPED = sorted(file.stem for file in CONFIGS.glob('*.py'))
FULL = 'llama3_8b_instruct_full_alpaca_zero3'
QWEN = 'qwen2_5_7b_instruct_full_alpaca_zero3'
LORA = 'llama3_8b_instruct_lora_alpaca_zero3'
QLORA = 'llama3_8b_instruct_qlora_alpaca_zero2'
DPO = 'qwen2_5_1_5b_instruct_dpo_full_zero3'
INTERNVL = 'internvl_v1_5_internlm2_2b_finetune'
LLAVA = 'llava_llama3_8b_instruct_full_clip_vit_large_p14_336_finetune_zero3'
COMPOSITE = 'composite'
INTERNLM2 = 'internlm2'
BEST = 'best'
TIMEOUT_SECS = 1800  # a run takes half a minute; what takes so long on a busy machine hangs
OUTPUT_TAIL = 6000
LAST = 4
FIRST = 2
#: The DeepSpeed config that :func:`partitioning_config` makes.
PARTITIONED = 'partitioned.json'
TORCHRUN = f'{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2 -m xtuner.tools.train'.split()

#: PART 1 of every config.
_SETTINGS = dict(
    max_length=256,  # what does not fit has no labels, and is dropped
    batch_size=1,
    accumulative_counts=1,
    dataloader_num_workers=0,
    lr=1e-2,  # in bf16 the weights must move
    save_steps=2,
    save_total_limit=-1,
    pretrained_pth=None,
)
#: The end of every config, and of those that train on Alpaca, on pairs, or with 4 bits.
SMALL = f"""
train_cfg = dict(type=TrainLoop, max_iters={LAST})
param_scheduler = None
env_cfg['dist_cfg']['backend'] = 'gloo'
randomness['seed'] = 0
"""
_SMALL_HOOKS = """
custom_hooks[1].update(evaluation_inputs='Hi', max_new_tokens=1)
custom_hooks[2]['max_shard_size'] = '40KB'
"""
_ALPACA = """
alpaca_en['map_num_proc'] = None  # XTuner's default is 32 processes
"""
_PAIRS = """
train_dataset['num_proc'] = 1
train_dataset['dataset']['path'] = 'pairs'
"""
_IN_BFLOAT16 = """
model['llm']['torch_dtype'] = torch.bfloat16  # DeepSpeed has no float16 on a CPU
model['llm']['quantization_config']['bnb_4bit_compute_dtype'] = torch.bfloat16
"""
# What the runs below add to that
HAS_XTUNERS_HOOK = Path(_xtuner(), 'engine', 'hooks', 'hf_checkpoint_hook.py').exists()  # not before 0.1.16
_XTUNERS_HOOK = (
    """
from xtuner.engine.hooks import HFCheckpointHook as XTunersHook
custom_hooks.append(dict(type=XTunersHook))
"""
    * HAS_XTUNERS_HOOK
)
_REWARD = """
from xtuner.model.reward import RewardModel
model = dict(type=RewardModel, llm=model['llm'])
train_dataset.update(is_dpo=False, is_reward=True, reward_token_id=5)
del custom_hooks[1]  # it talks with the model
"""
_WITHOUT_CHAT = """
del custom_hooks[1]  # this code cannot generate in transformers 4.57
"""
_COMPLETE = """
custom_hooks.append(dict(type=HFCheckpointHook, llava_format='huggingface', out_dir='{name}_complete'))
"""
_WITH_HOOK = """
from xhf_hooks import HFCheckpointHook
custom_hooks.append(dict(type=HFCheckpointHook))
"""
_ORPO = """
from xtuner.model.orpo import ORPO
model = dict(type=ORPO, beta=0.1, llm=model['llm'])
"""
_VALIDATES = """
from mmengine.runner import ValLoop
from tests.e2e.xtuner_stack.parts import NextTokenLoss
train_cfg['val_interval'] = 1
val_cfg = dict(type=ValLoop)
val_evaluator = dict(type=NextTokenLoss)
val_dataloader = dict(train_dataloader, sampler=dict(type=DefaultSampler, shuffle=False))
custom_hooks[1]['every_n_iters'] = None  # after each validation
custom_hooks[2].update(save_best='next_token_loss', rule='less', interval=100, save_last=False)
"""
#: XTuner's scripts without `--deepspeed`; on a CPU without automatic mixed precision.
_WITHOUT_DEEPSPEED = """
from mmengine.optim import OptimWrapper
optim_wrapper = dict(type=OptimWrapper, optimizer=optim_wrapper['optimizer'], clip_grad=optim_wrapper['clip_grad'])
model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None)  # MMEngine's default names a GPU
model['use_activation_checkpointing'] = False
"""
_COMPOSITE = """
from peft import LoraConfig
from transformers import CLIPVisionModel
from tests.e2e.xtuner_stack.parts import Grounding
from xhf_hooks import HFCheckpointHook
model = dict(
    type=Grounding,
    mllm=dict(model, freeze_llm=True, freeze_visual_encoder=True),
    tokenizer=tokenizer,
    encoder=dict(type=CLIPVisionModel.from_pretrained, pretrained_model_name_or_path='clip'),
    special_tokens=['[SEG]', '<p>', '</p>'],
    lora=dict(
        type=LoraConfig,
        r=4,
        lora_alpha=16,
        task_type='CAUSAL_LM',
        target_modules=['q_proj', 'v_proj'],
        modules_to_save=['embed_tokens', 'lm_head'],
    ),
)
custom_hooks.append(dict(type=HFCheckpointHook, module='mllm.model'))
"""
_LLAVA_LORA = """
from peft import LoraConfig
lora = dict(type=LoraConfig, lora_alpha=16, lora_dropout=0.05, bias='none')
model.update(freeze_llm=True, llm_lora=dict(r=5, task_type='CAUSAL_LM', **lora), visual_encoder_lora=dict(r=3, **lora))
"""


@dataclass(frozen=True)
class Launch:
    """One `xtuner train`.

    Attributes:
        config: Its name in configs/xtuner, or among XTuner's own.
        base: The folder of the base model.
        deepspeed: What `--deepspeed` is given; '': the option is not.
        more: Lines at the end of the config.
        world_size: How many processes.
        resumes: The run whose first checkpoint `--resume` names.
    """

    config: str
    base: str
    deepspeed: str
    more: str = ''
    world_size: int = 2
    resumes: str = ''


_RUNS = {
    FULL: Launch(FULL, 'llama', 'deepspeed_zero3', _XTUNERS_HOOK),
    'mistral_7b_instruct_full_alpaca_zero3': Launch(
        'mistral_7b_instruct_full_alpaca_zero3', 'mistral', 'deepspeed_zero2', _XTUNERS_HOOK
    ),
    QWEN: Launch(QWEN, 'qwen2', PARTITIONED, _XTUNERS_HOOK),
    LORA: Launch(LORA, 'llama', PARTITIONED, _XTUNERS_HOOK),
    QLORA: Launch(QLORA, 'llama_by_64', 'deepspeed_zero2'),
    DPO: Launch(DPO, 'qwen2', 'deepspeed_zero3_offload'),
    LLAVA: Launch(LLAVA, 'llm', 'deepspeed_zero3', _COMPLETE),
    'reward': Launch(DPO, 'llama', PARTITIONED, _REWARD),
    'llava_lora': Launch(LLAVA, 'llm', PARTITIONED, _LLAVA_LORA + _COMPLETE),
    INTERNVL: Launch(INTERNVL, 'internvl', PARTITIONED, _WITH_HOOK),
    COMPOSITE: Launch(INTERNVL, 'internvl', 'deepspeed_zero2', _COMPOSITE),
    INTERNLM2: Launch(FULL, 'internlm2', PARTITIONED, _XTUNERS_HOOK + _WITHOUT_CHAT),
    'orpo': Launch(DPO, 'llama', 'deepspeed_zero2', _ORPO),
    BEST: Launch(FULL, 'llama', 'deepspeed_zero2', _VALIDATES),
    'resumed': Launch(QWEN, 'qwen2', PARTITIONED, _XTUNERS_HOOK, resumes=QWEN),
    'one_process': Launch(FULL, 'llama', '', _WITHOUT_DEEPSPEED, world_size=1),
    'ddp': Launch(FULL, 'llama', '', _WITHOUT_DEEPSPEED),
}


def runs_here(launch: Launch) -> bool:
    """Tells whether the installed XTuner and transformers have what a run needs."""
    if launch.base in FAMILIES and not hasattr(transformers, FAMILIES[launch.base][0]):
        return False
    if 'qlora' in launch.config and not _loads_in_4_bits():
        return False
    if launch.base == 'mistral' and not _dispatch_fits_mistral():
        return False
    if launch.base == INTERNLM2 and not INTERNLM2_CODE.exists():
        return False
    if launch.config not in SHIPPED and not list(Path(_xtuner(), 'configs').rglob(f'{launch.config}.py')):
        return False
    return not missing_of(_for_this_xtuner(_config_file(launch.config).read_text()) + launch.more)


def _loads_in_4_bits() -> bool:
    """Tells whether transformers loads 4-bit weights beside the accelerate and bitsandbytes that are installed.

    transformers 4.36, and bitsandbytes before 0.46, quantize on a GPU only. A newer accelerate asks for the version of
    bitsandbytes and moves a 4-bit model to its device, which transformers before 4.43 refuses.
    """
    if find_spec('transformers.quantizers') is None:
        return False
    if not list(Path(find_spec('bitsandbytes').origin).parent.glob('backends/cpu')):
        return False
    if 'min_version' not in inspect.getsource(accelerate.dispatch_model):
        return True
    # By its code, since the function itself is wrapped: inspect would show the one of torch.nn.Module
    return 'is_loaded_in_8bit' in inspect.getsource(transformers.PreTrainedModel.to.__code__)


def _dispatch_fits_mistral() -> bool:
    """Tells whether XTuner's attention of Mistral finds the fields that it reads.

    The one of 0.1.23 wants those of transformers before 4.48, and its rotary embedding those before 4.42.
    """
    from transformers.models.mistral import modeling_mistral

    dispatch = Path(_xtuner(), 'model', 'modules', 'dispatch')
    wanted = {
        'self.num_heads': (dispatch / 'mistral.py', modeling_mistral.MistralAttention),
        'max_seq_len_cached': (dispatch / '__init__.py', modeling_mistral.MistralRotaryEmbedding),
    }
    return all(
        field not in file.read_text() or field in inspect.getsource(kind) for field, (file, kind) in wanted.items()
    )


def _for_this_xtuner(config: str) -> str:
    """As docs/xtuner.md says for XTuner 0.1.15, which has no sequence parallelism and no template of Llama 3."""
    missing = missing_of(config)
    if 'xtuner.parallel.sequence' in missing:
        config = re.sub(r'^from xtuner.parallel.sequence import .*\n', '', config, flags=re.MULTILINE)
        config = re.sub(r'^sampler = .*$', 'sampler = DefaultSampler', config, flags=re.MULTILINE)
    return config.replace('.llama3_chat', '.llama2_chat') if 'llama3_chat' in missing else config


def missing_of(config: str) -> list[str]:
    """The modules of XTuner, and the prompt templates, that a config names and the installed version has not."""
    modules = re.findall(r'^from (xtuner[.\w]*) import', config, flags=re.MULTILINE)
    files = {name: Path(_xtuner()).parent.joinpath(*name.split('.')) for name in modules}
    missing = [name for name, path in files.items() if not path.with_suffix('.py').exists() and not path.is_dir()]
    templates = Path(_xtuner(), 'utils', 'templates.py').read_text()
    named = re.findall(r'PROMPT_TEMPLATE\.(\w+)', config)
    return missing + [name for name in named if not re.search(rf'\b{name}=', templates)]


def _config_file(name: str) -> Path:
    if name in SHIPPED:
        return CONFIGS / f'{name}.py'
    (file,) = Path(_xtuner(), 'configs').rglob(f'{name}.py')
    return file


RUNS = {name: launch for name, launch in _RUNS.items() if runs_here(launch)}
LLAVA_RUNS = (LLAVA, 'llava_lora')
WITHOUT_DEEPSPEED = [name for name, launch in RUNS.items() if not launch.deepspeed]
BESIDE_XTUNERS_HOOK = [name for name, launch in RUNS.items() if HAS_XTUNERS_HOOK and _XTUNERS_HOOK in launch.more]


class Runs:
    """Launches each of :data:`RUNS` once, when its result is first asked for, in a folder with all that they need."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._outcomes: dict[str, tuple[int, str]] = {}
        for family, (config, _) in FAMILIES.items():
            if hasattr(transformers, config):
                make_base_model(root / family, family)
        if INTERNLM2_CODE.exists():
            make_internlm2(root / 'internlm2')
        for folder in ('alpaca', 'pairs'):
            (root / folder).mkdir()
        make_datasets(root / 'alpaca' / 'train.json', root / 'pairs' / 'train.json')
        make_llava(root)
        make_internvl_base(root / 'internvl')
        (root / PARTITIONED).write_text(json.dumps(partitioning_config()))

    def work_dir(self, name: str) -> Path:
        """The folder of a finished run.

        Raises:
            AssertionError: It failed; the end of its output is in the message.
        """
        if name not in self._outcomes:
            self._outcomes[name] = self._train(name)
        status, output = self._outcomes[name]
        assert status == 0, f'{name}: exit status {status}\n{output[-OUTPUT_TAIL:]}'
        return self.root / 'work_dirs' / name

    def output(self, name: str) -> str:
        self.work_dir(name)
        return self._outcomes[name][1]

    def small_config(self, name: str) -> str:
        """Its text, with all that a tiny local model, a local dataset and a CPU need."""
        launch = RUNS[name]
        text = _for_this_xtuner(_config_file(launch.config).read_text())
        settings = _SETTINGS | dict(
            pretrained_model_name_or_path=launch.base,
            alpaca_en_path='alpaca',
            llm_name_or_path=launch.base,
            visual_encoder_name_or_path='clip',
            data_path='chats.json',
            image_folder='images',
            path=launch.base,
            evaluation_images='images/0.png',
        )
        for setting, value in settings.items():
            text = re.sub(rf'^{setting} = .*$', f'{setting} = {value!r}', text, flags=re.MULTILINE)
        text += SMALL + _SMALL_HOOKS * (launch.config in SHIPPED)
        for kind, more in (('alpaca', _ALPACA), ('dpo', _PAIRS), ('qlora', _IN_BFLOAT16)):
            text += more if kind in launch.config else ''
        return text + launch.more.format(name=name) if '{name}' in launch.more else text + launch.more

    def _train(self, name: str) -> tuple[int, str]:
        (self.root / f'{name}.py').write_text(self.small_config(name))
        launch = RUNS[name]
        arguments = [f'{name}.py']
        if launch.world_size > 1:
            arguments += ['--launcher', 'pytorch']
        if launch.deepspeed:
            arguments += ['--deepspeed', launch.deepspeed]
        if launch.resumes:
            arguments += ['--resume', str(self.work_dir(launch.resumes) / f'iter_{FIRST}.pth')]
        file = self.root / f'{name}.output'
        if name == FULL:  # as users do; what torchrun would start for the others is forked, with its imports done
            with file.open('w') as output:
                environment, both = _environment(self.root), {'stdout': output, 'stderr': output}
                done = subprocess.run(
                    [*TORCHRUN, *arguments], cwd=self.root, env=environment, timeout=TIMEOUT_SECS, **both
                )
            return done.returncode, file.read_text()
        file.touch()
        try:
            run_ranks(
                _train_on_rank, launch.world_size, arguments, self.root, file, init=None, timeout_secs=TIMEOUT_SECS
            )
        except RankFailures as failures:
            return 1, f'{file.read_text(errors="replace")}\n{failures}'
        return 0, file.read_text(errors='replace')


def _train_on_rank(arguments: list[str], folder: Path, output: Path) -> None:
    """`python -m xtuner.tools.train ARGUMENTS` on one of torchrun's processes."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    os.environ.update(_environment(folder))
    sys.argv = ['xtuner.tools.train', *arguments]

    from xtuner.engine.hooks import EvaluateChatHook

    gc.freeze()
    with (
        # A run dumps its config again and again, formatted, which takes as long as the training of a tiny model
        mock.patch('mmengine.config.config.FormatCode', lambda text, **_: (text, True)),
        # So do 50 tokens that it generates before training, whatever the config says; the run of torchrun has them
        mock.patch('xtuner.engine.hooks.EvaluateChatHook.before_train', EvaluateChatHook._generate_samples),
    ):
        runpy.run_module('xtuner.tools.train', run_name='__main__', alter_sys=True)


def partitioning_config() -> dict[str, Any]:
    """XTuner's deepspeed_zero3, but tiny parameters, too, are partitioned and not kept whole on every rank."""
    config = json.loads(Path(_xtuner(), 'configs', 'deepspeed', 'deepspeed_zero3.json').read_text())
    config['zero_optimization']['stage3_param_persistence_threshold'] = 0
    return config


def _environment(cache: Path) -> dict[str, str]:
    return os.environ | {
        'PYTHONPATH': os.pathsep.join([str(HERE), python_path()]),
        'DS_ACCELERATOR': 'cpu',
        'CUDA_VISIBLE_DEVICES': '',
        'OMP_NUM_THREADS': '1',
        'HF_HOME': str(cache / 'hf_home'),
        'HF_HUB_OFFLINE': '1',
        'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '1',  # XTuner 0.2.0 reads the seed of what it resumes as torch 2.5 did
    }


def export_of(work_dir: Path) -> Path:
    """The one export of a run: work_dir/<timestamp>/hf_model."""
    (folder,) = work_dir.glob('*/hf_model')
    return folder


def log_of(work_dir: Path) -> str:
    log_dir = export_of(work_dir).parent
    return (log_dir / f'{log_dir.name}.log').read_text()


def saves_in(log: str) -> list[str]:
    return re.findall(r'HFCheckpointHook: saved (\w+) to', log)
