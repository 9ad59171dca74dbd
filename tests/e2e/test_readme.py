"""The README is executable: its commands run, its code blocks work, its trees are what comes out."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config
from mmengine.registry import HOOKS

from tests.helpers.checks.pages import PAGES, ROOT, blocks, code
from tests.helpers.models.model_folder import save_model, save_tokenizer
from tests.helpers.ranks.launch import run_program, run_ranks
from xhf_hooks import HFCheckpointHook
from xhf_hooks.offline.commands import verify

README = PAGES['README.md']
BENCHMARKS = ['save', 'floors', 'hsdp', 'throttled', 'memory', 'stall', 'start', 'convert', 'upload']
ENTER = 'source tools/env.sh && use_env .venv'
#: A shell in which nothing was set up.
BARE = {'PATH': '/usr/local/bin:/usr/bin:/bin', 'HOME': '/nonexistent'}
XTUNER_CONFIG = 'llama3_8b_instruct_full_alpaca_e3'
AFTER_THE_DEMO = [
    'xhf-verify work_dirs/demo/*/hf_model',
    'xhf-convert work_dirs/demo OUT',
    'xhf-verify --compare OUT work_dirs/demo/*/hf_model',
]
#: What tools/env.sh prints when it makes the environment on a machine without a GPU.
LINES_OF_A_FIRST_START = 8
#: Every command of every page, but versions.md, whose lines tools/env.sh runs. Tests below run them, or as it says.
#: docs/xtuner.md: packages in the versions of requirements/xtuner-0.1.txt (test_the_courses_packages_are_those_tested),
#: and the commands that tests/e2e/xtuner_stack runs with them (test_train, test_drop_in).
XTUNER_FROM_NOTHING = (
    'python3.10 -m venv xtuner-env && source xtuner-env/bin/activate',
    'pip install torch==2.4.1 torchvision==0.19.1',
    "pip install 'xtuner[deepspeed]==0.1.23' transformers==4.39.0 accelerate==0.27.0 peft==0.13.2 deepspeed==0.16.1 \\",
    "    mmengine==0.10.5 datasets==3.1.0 huggingface-hub==0.26.5 'numpy<2' 'setuptools<81'",
    'pip install /path/of/this/clone',
    'xtuner copy-cfg internlm2_chat_1_8b_full_alpaca_e3 .',
    'xtuner train internlm2_chat_1_8b_full_alpaca_e3_copy.py --deepspeed deepspeed_zero2',
    'xhf-verify work_dirs/internlm2_chat_1_8b_full_alpaca_e3_copy/*/hf_model',
    'xhf-convert work_dirs/NAME OUT',
    'xhf-verify OUT',
    # After QLoRA, as test_a_qlora_run_is_merged_and_talks does
    'NAME=internlm2_chat_1_8b_qlora_alpaca_e3_copy',
    'ADAPTER=$(ls -d work_dirs/$NAME/*/hf_model | tail -n 1)',
    'xtuner chat ./internlm2-chat-1_8b --adapter $ADAPTER --prompt-template internlm2_chat',
    'xhf-convert work_dirs/$NAME merged --lora merge --trust-remote-code',
    'xtuner chat ./merged --prompt-template internlm2_chat',
)
#: tests/trainers/test_xtuner_v1.py runs V1 from a clone, and converts.
XTUNER_V1 = (
    'git clone https://github.com/InternLM/xtuner',
    'pip install -e xtuner',
    'xhf-convert work_dirs/20261128/checkpoints/ckpt-step-500/weights OUT --base FOLDER --dtype bfloat16',
)
_PRETRAIN = 'llava_llama3_8b_instruct_clip_vit_large_p14_336_e1_gpu8_pretrain'
_FINETUNE = 'llava_llama3_8b_instruct_full_clip_vit_large_p14_336_lora_e1_gpu8_finetune'
_CLIP = '--visual-encoder openai/clip-vit-large-patch14-336 --llava $SAVE --prompt-template llama3_chat'
#: XTuner's own commands around a save, typed once as on docs/xtuner.md, with tiny models on a CPU (convert_to_hf.py
#: wants SAM2, and was read). tests/e2e/xtuner_stack tests what they read, and conversions with --base.
XTUNERS_OWN = (
    f'xtuner copy-cfg {_PRETRAIN} .',
    f'xtuner copy-cfg {_FINETUNE} .',
    *(f'NPROC_PER_NODE=8 xtuner train {name}_copy.py --deepspeed deepspeed_zero2' for name in (_PRETRAIN, _FINETUNE)),
    f'xhf-verify work_dirs/{_PRETRAIN}_copy/*/hf_model',
    f'SAVE=$(ls -d work_dirs/{_FINETUNE}_copy/*/hf_model | tail -n 1)',
    f'xtuner chat $SAVE {_CLIP} --image IMAGE',
    f'xtuner mmbench $SAVE {_CLIP} \\',
    '    --data-path MMBench_DEV_EN.tsv --work-dir mmbench',
    'xhf-convert work_dirs/internvl_v2_internlm2_2b_lora_finetune_copy/iter_1000.pth OUT --trust-remote-code',
    'python tools/convert_to_hf.py projects/sa2va/configs/sa2va_in30_8b_copy.py other_modules.pth --save-path OUT',
    'xhf-convert work_dirs/NAME/iter_2000.pth OUT --trust-remote-code',
)
COMMANDS = {
    *('bash tools/demo.sh', 'bash tools/test.sh', ENTER, *AFTER_THE_DEMO),
    'pip install .',  # test_wheel
    'xhf-convert CHECKPOINT OUT --dry-run',  # test_convert_command
    'xhf-convert CHECKPOINT OUT --verify full',
    'xhf-verify DIR',  # test_verify_command
    'xhf-verify --compare A B',
    f'xtuner copy-cfg {XTUNER_CONFIG} .',  # in tests/e2e/xtuner_stack: test_drop_in, test_train
    f'NPROC_PER_NODE=8 xtuner train {XTUNER_CONFIG}_copy.py --deepspeed deepspeed_zero3',
    f'xhf-verify work_dirs/{XTUNER_CONFIG}_copy/*/hf_model',
    'bash tools/test.sh tests/stress/test_kills.py --times 30',  # once in every run
    'bash tools/test.sh --network-fs',  # before a release
    *(f'python tools/bench.py {what}' for what in BENCHMARKS),
    f'{ENTER}-xtuner-0.1',
    *XTUNER_FROM_NOTHING,
    *XTUNERS_OWN,
    *XTUNER_V1,
}
CONFIG_LINES = {
    "dict(type='xhf_hooks.HFCheckpointHook')": 'README.md',
    "save_on_signal='SIGTERM', upload_to='s3://bucket/run'": 'README.md',
    'pretrained_model_name_or_path': 'getting-started.md',
    "out_dir='work_dirs/NAME/hf_model'": 'getting-started.md',
    'interval=500': 'getting-started.md',
    'save_on_signal=': 'on-demand.md',
    'python evaluate.py': 'on-saved.md',
    "upload_to='s3://bucket/run', upload_keep=3": 'object-stores.md',
    'endpoint_url=': 'object-stores.md',
    'hf upload organization/name': 'on-saved.md',
    'hf://buckets/organization': 'object-stores.md',
    "out_dir='/local/run/hf_model'": 'object-stores.md',
}


@pytest.fixture(scope='module')
def demo():
    """What `bash tools/demo.sh` prints; it checks by itself that the loss fell."""
    finished = subprocess.run(['bash', 'tools/demo.sh'], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout


@pytest.fixture(scope='module')
def demo_folder(demo):
    return max((ROOT / 'work_dirs' / 'demo').glob('*/hf_model'))


def test_every_command_is_known_here():
    pages = PAGES.keys() - {'versions.md'}
    assert {line for page in pages for block in blocks('bash', page) for line in block.splitlines()} == COMMANDS


def test_the_courses_packages_are_those_tested():
    pinned = (ROOT / 'requirements' / 'xtuner-0.1.txt').read_text().replace('_', '-').splitlines()
    named = re.findall(r'[\w-]+(?:\[\w+\])?==[\d.]+', ' '.join(XTUNER_FROM_NOTHING))
    elsewhere = [one for one in named if one not in pinned]
    assert len(named) == 10 and elsewhere == ['xtuner[deepspeed]==0.1.23']  # whose file is that of no_deps


def test_every_block_of_code_is_run():
    """By the test that names some of its words, here, with vLLM's server, or on two ranks."""
    more = ['tests/trainers/test_vllm.py', 'tests/unit/test_extending.py', 'tests/helpers/runs/engine_of_rows.py']
    more += [f'tests/e2e/xtuner_stack/test_{name}.py' for name in ('llava_train', 'train')]
    files = [Path(__file__), *(ROOT / name for name in more)]
    source = '\n'.join(file.read_text(encoding='utf-8') for file in files)
    for page in PAGES:
        for block in blocks('python', page):
            words = [found for found in re.findall(r"code\('([^']+)'", source) if found in block]
            assert words or any(words in block for words in CONFIG_LINES), f'{page}: {block}'


def shapes(text: str) -> list[str]:
    """The lines of a log without root, date and figures."""
    lines = text.replace(f'{ROOT}/', '').splitlines()
    return [re.sub(r'[\d.]+(e-\d+)?', '0', re.sub(r'^(\d{4}/)?\d\d/\d\d [\d:]{8} - ', '', line)) for line in lines]


def test_the_demo_leaves_what_the_pages_show(demo_folder):
    """The tree, the log, and a folder that the lines for loading load; transformers 4.48 reads its tokenizer, too."""
    (tree,) = [block for block in blocks('text') if block.startswith('work_dirs/demo')]
    names = re.findall(r'^ {4}(\S+)', tree, flags=re.MULTILINE)
    assert sorted(names) == sorted(path.name for path in demo_folder.iterdir())
    (shown,) = [block for block in blocks('text', 'getting-started.md') if 'ready to save' in block]
    log = shapes((demo_folder.parent / f'{demo_folder.parent.name}.log').read_text())
    assert not [line for line in shapes(shown) if line not in log]
    lines = code('model = AutoModelForCausalLM', 'getting-started.md')
    lines = lines.replace('work_dirs/demo/<timestamp>/hf_model', str(demo_folder))
    (finished,) = run_program(lines)
    assert finished.returncode == 0, finished.stderr
    settings = json.loads((demo_folder / 'tokenizer_config.json').read_text())
    assert settings['tokenizer_class'] == 'LlamaTokenizer' and settings.get('add_prefix_space') is None


def test_the_demo_saves_as_often_as_the_readme_says(demo):
    config = Config.fromfile(ROOT / 'configs' / 'demo_zero3.py', import_custom_modules=False)
    times = config.max_iters // config.save_interval + bool(config.max_iters % config.save_interval)
    assert times == 2
    assert 'saves it twice' in ' '.join(README.split())
    assert '保存两次' in (ROOT / 'README_zh-CN.md').read_text(encoding='utf-8')
    assert demo.count('HFCheckpointHook: saved iter_') == times and f' s for {times} saves.' in demo


def test_the_demo_is_short_and_writes_python(demo):
    """Its text is a class that parses; with the lines of a first start it is below 70 lines."""
    lines = demo.splitlines()
    assert len(lines) + LINES_OF_A_FIRST_START < 70
    assert len([line for line in lines if re.fullmatch(r' +iteration +\d+ of 100 +loss [\d.]+ +#+', line)]) == 10
    assert '20 identical, 0 rounding, 0 different' in demo
    begin = next(number for number, line in enumerate(lines) if 'class Stack(Queue)' in line)
    end = next(number for number, line in enumerate(lines) if line.startswith('== saved '))
    text = textwrap.dedent('\n'.join(lines[begin + 1 : end]))
    assert ast.parse(text if not text.rstrip().endswith(':') else f'{text} pass') and len(text.split('\n')) > 6


def test_the_demo_names_the_lines_of_the_readme(demo):
    """What to type next is what the README says."""
    trainer, xtuner = code('HFCheckpointCallback()'), blocks('diff')[0]
    added = [line[1:] for line in xtuner.splitlines() if line.startswith('+')]
    for line in [*filter(None, trainer.splitlines()), *added]:
        assert line.strip() in demo


@pytest.mark.needs()
def test_a_run_that_is_killed_while_it_saves_goes_on():
    """The demo's --kill: `hf_model` is the first save when the second is killed, and the last one in the end."""
    finished = subprocess.run(['bash', 'tools/demo.sh', '--kill'], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    killed, went_on = finished.stdout.split('== the same training, started again')
    assert 'killed (SIGKILL) while it writes' in killed
    assert 'good (' in killed and 'iter 5,' in killed
    assert 'good (' in went_on and 'iter 15,' in went_on and 'iteration  15 of 15' in went_on
    left = [re.findall(r'^\.?hf_model\S*', part, flags=re.MULTILINE) for part in (killed, went_on)]
    assert len(left[0]) > 1 and left[1] == ['hf_model']


def test_the_demo_shows_what_went_wrong():
    """After each report that it leaves out."""
    record = '11/28 14:42:19 - mmengine - {} - {}'.format
    log = [
        record('INFO', 'Config:'),
        'max_iters = 100',
        record('ERROR', 'bad'),
        record('INFO', 'Saving checkpoint at 50'),
    ]
    log += ['Traceback (most recent call last):', record('INFO', '\n---\nSystem'), record('INFO', 'next'), 'line']
    command = [sys.executable, 'tools/demo/show.py']
    shown = subprocess.run(command, cwd=ROOT, input='\n'.join(log), capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ['ERROR: bad', 'Traceback (most recent call last):', 'next', 'line']


def test_what_follows_the_demo_works_as_typed(demo_folder, tmp_path, monkeypatch):
    """In a work_dir with this one run: the last line has a place for one."""
    work_dir = tmp_path / 'work_dirs' / 'demo'
    shutil.copytree(demo_folder.parents[1], work_dir, symlinks=True)
    for timestamp in work_dir.glob('*/hf_model'):
        if timestamp.parent.name != demo_folder.parent.name:
            shutil.rmtree(timestamp.parent)
    monkeypatch.chdir(tmp_path)
    for line in AFTER_THE_DEMO:
        name, *words = line.split()
        arguments = [path for word in words for path in sorted(map(str, Path().glob(word))) or [word]]
        (finished,) = run_program(Path(sys.executable).with_name(name), *arguments)
        assert finished.returncode == 0, finished.stdout + finished.stderr
    assert '20 identical' in finished.stdout


@pytest.mark.parametrize('words', CONFIG_LINES)
def test_the_config_lines_configure_the_hook(words):
    config = Config.fromstring(code(words, CONFIG_LINES[words]), '.py')
    assert isinstance(HOOKS.build(config.custom_hooks[0]), HFCheckpointHook)


def test_what_stands_alone_can_be_used():
    """The import to add to XTuner's configs, and the recipe after each save."""
    (lines,) = blocks('diff')
    after = lines.splitlines()[0]
    found: dict[str, Any] = {}
    for text in (after.removeprefix('+'), code('lm_eval', 'on-saved.md')):
        exec(text, found)
    hook = found['HFCheckpointHook'](on_saved=found['on_saved'])
    assert hook.options.on_saved[-2:] == ('{path}', '{output}/lm_eval')


def test_the_recipe_for_a_slow_mount_copies_whole_folders(tmp_path):
    """Also over what an earlier, interrupted copy left."""
    found: dict[str, Any] = {}
    exec(code('/mnt/slow/run', 'on-saved.md'), found)
    (tmp_path / 'save').mkdir()
    (tmp_path / 'slow' / 'iter_500.part' / 'left').mkdir(parents=True)
    for text in ('old', 'new'):
        (tmp_path / 'save' / 'config.json').write_text(text)
        values = {'{path}': tmp_path / 'save', '/mnt/slow/run': tmp_path / 'slow', '{label}': 'iter_500'}
        subprocess.run([values.get(word, word) for word in found['on_saved']], check=True)
        assert [path.name for path in (tmp_path / 'slow').iterdir()] == ['iter_500']
        assert (tmp_path / 'slow' / 'iter_500' / 'config.json').read_text() == text
        assert [path.name for path in (tmp_path / 'slow' / 'iter_500').iterdir()] == ['config.json']


def test_hf_knows_the_options_of_the_recipe_for_the_hub():
    found: dict[str, Any] = {}
    exec(code('hf upload', 'on-saved.md'), found)
    program = Path(sys.executable).with_name('hf')
    shown = subprocess.run([program, 'upload', '--help'], capture_output=True, text=True, check=True).stdout
    options = [word for word in found['on_saved'].split() if word.startswith('--')]
    assert len(options) == 2 and [option for option in options if option not in shown] == []


def test_the_lines_that_let_mmengine_resume(tmp_path):
    """Its checkpoints hold its own objects, such as the buffers of its log."""
    lines = """import sys
from mmengine.logging import HistoryBuffer
exec(sys.argv[2])
torch.save(HistoryBuffer([1.0], [1]), sys.argv[1])
torch.load(sys.argv[1])"""
    (finished,) = run_program(lines, tmp_path / 'iter_1.pth', code('torch.load', 'getting-started.md'))
    assert finished.returncode == 0, finished.stderr


def accelerate_loop(lines: str, folder: Path) -> None:
    """The loop of the README at ZeRO-3. Runs on: all ranks.

    Without an accelerator Accelerate does not know of the other ranks: each gets all 16 batches.
    """
    import torch
    from transformers import AutoTokenizer

    from tests.helpers.models.zoo.llamas import odd_llama
    from tests.helpers.runs import frontends as doors
    from tests.helpers.runs.zero_config import zero_config

    (folder / 'zero3.json').write_text(json.dumps(zero_config(3)))
    model = odd_llama()
    names = dict(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loader=torch.utils.data.DataLoader(doors.Sequences()),
        tokenizer=AutoTokenizer.from_pretrained(folder / 'tokenizer'),
    )
    zero3 = dict(ACCELERATE_USE_DEEPSPEED='true', ACCELERATE_DEEPSPEED_CONFIG_FILE=str(folder / 'zero3.json'))
    with doors.fresh_accelerate(**zero3):
        exec(lines.replace("'out/hf_model'", repr(str(folder / 'hf_model'))).replace('500', '3'), names)


def test_the_accelerate_loop_saves(tmp_path):
    save_tokenizer(tmp_path / 'tokenizer', 8)
    run_ranks(accelerate_loop, 2, code('Accelerator', 'trainers.md'), tmp_path)
    assert verify.main([str(tmp_path / 'hf_model'), '--load']) == verify.SAME
    assert json.loads((tmp_path / 'hf_model' / 'xhf_manifest.json').read_text())['iteration'] == 15


def trains_by(lines: str, folder: Path) -> None:
    """Run the lines that make a Trainer, and train."""
    from transformers import Trainer, TrainingArguments

    from tests.helpers.models.zoo.llamas import odd_llama
    from tests.helpers.runs.frontends import Sequences

    options = dict(max_steps=2, save_strategy='no', report_to='none', use_cpu=True)
    arguments = TrainingArguments(output_dir=str(folder), **options)
    exec(lines, dict(Trainer=Trainer, model=odd_llama(), arguments=arguments, data=Sequences()))


def test_the_lines_for_trainer_save(tmp_path):
    run_ranks(trains_by, 1, code('callbacks=[HFCheckpointCallback()]'), tmp_path)
    assert verify.main([str(tmp_path / 'hf_model'), '--load']) == verify.SAME


def trains_as_shown(lines: str, folder: Path) -> None:
    """Run the whole call of Trainer, for a few steps on the CPU. Runs on: all ranks."""
    from tests.helpers.runs import frontends as doors
    from tests.helpers.runs.zero_config import zero_config

    (folder / 'zero3.json').write_text(json.dumps(zero_config(3) | {'train_micro_batch_size_per_gpu': 'auto'}))
    for shown, here in {
        'bf16=True': "bf16=True, use_cpu=True, ddp_backend='gloo'",
        "'out'": repr(str(folder / 'out')),
        "'zero3.json'": repr(str(folder / 'zero3.json')),
        "'path/of/the/base'": repr(str(folder / 'base')),
        '1000': '4',
        '500': '2',
    }.items():
        assert shown in lines, shown
        lines = lines.replace(shown, here)
    with doors.fresh_accelerate(ACCELERATE_USE_DEEPSPEED='true'):
        exec(lines, dict(data=doors.Sequences()))


def test_the_whole_call_of_trainer_saves(tmp_path):
    save_model('llama', tmp_path / 'base')
    run_ranks(trains_as_shown, 2, code('save_steps=500', 'trainers.md'), tmp_path)
    assert sorted(path.name for path in (tmp_path / 'out').glob('hf*')) == ['hf_model', 'hf_model_iter_2']
    assert verify.main([str(tmp_path / 'out' / 'hf_model'), '--load']) == verify.SAME


def saves_by(lines: str, stage: int | None, folder: Path) -> None:
    """Run lines that save a model, or an engine. Runs on: all ranks."""
    from transformers import AutoTokenizer

    from tests.helpers.models.zoo.llamas import odd_llama
    from tests.helpers.runs.engines import zero_engine

    model = odd_llama()
    names = dict(model=model, step=3, tokenizer=AutoTokenizer.from_pretrained(folder / 'tokenizer'))
    if stage is not None:
        names['engine'] = zero_engine(model, stage)
    exec(lines.replace("'out/hf_model'", repr(str(folder / 'hf_model'))), names)


def test_the_lines_that_run_a_model(tmp_path, capsys):
    save_model('llama', tmp_path / 'hf_model')
    exec(code('max_new_tokens=8', 'verifying.md').replace("'hf_model'", repr(str(tmp_path / 'hf_model'))), {})
    assert re.fullmatch(r'<unk> <unk> <unk> <unk> <unk>( \S+){1,8}', capsys.readouterr().out.strip())


@pytest.mark.parametrize('stage', [3, None])
def test_the_lines_for_those_who_come_from_elsewhere(stage, tmp_path):
    save_tokenizer(tmp_path / 'tokenizer', 8)
    lines = code('save_hf(engine', 'migrating.md') if stage else code('save_hf(model', 'migrating.md')
    run_ranks(saves_by, 2 if stage else 1, lines, stage, tmp_path)
    assert verify.main([str(tmp_path / 'hf_model'), '--load']) == verify.SAME


def test_the_example_exporter_is_chosen(monkeypatch):
    from torch import nn

    from tests.helpers.models.zoo import build
    from xhf_hooks.exporters import exporter_for
    from xhf_hooks.exporters.base import ExportRequest
    from xhf_hooks.registry import EXPORTERS
    from xhf_hooks.sources import source_for

    model = nn.Module()
    model.policy, model.reference = build('llama'), build('llama')
    monkeypatch.setattr(EXPORTERS, 'module_dict', dict(EXPORTERS.module_dict))
    exec(code('class PolicyExporter', 'extending.md'), {})
    exporter = exporter_for(model, None)
    assert type(exporter).__name__ == 'PolicyExporter'
    entries = exporter.export(ExportRequest(source_for(model).specs())).entries
    names = {f'policy.{name}' for name, _ in model.policy.named_parameters()}
    assert {read for entry in entries for read in entry.reads} == names


@pytest.mark.needs()
def test_the_benchmark_runs_outside_of_the_environment(tmp_path):
    """By its Python's path alone: torchrun and ninja are not on PATH."""
    command = [sys.executable, 'tools/bench.py', 'save', '--billions', '0.05', '--repeats', '1', '--in-a-row', '1']
    command += ['--ways', 'as the hook', 'XTuner']
    finished = subprocess.run([*command, '--out', str(tmp_path)], cwd=ROOT, env=BARE, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.startswith('0.05 B parameters'), 'what is pasted into the README is the table alone'
    (size,) = json.loads((tmp_path / 'save.json').read_text())['cases']
    share = {way: runs[0]['sent_mb'] * 1e6 / size['nbytes'] for way, runs in size['runs'].items()}
    assert share['xhf_hooks positional, with fsync, as the hook'] < 0.01
    assert '<svg' in (tmp_path / 'save.svg').read_text()


def test_the_line_that_enters_the_environment(tmp_path):
    """From a shell that knows nothing of it."""
    (tmp_path / 'env').symlink_to(sys.prefix)
    enter = ENTER.replace('.venv', str(tmp_path / 'env'))
    lines = f'{enter} && command -v torchrun ninja && python tools/verify.py --help'
    finished = subprocess.run(['bash', '-c', lines], cwd=ROOT, env=BARE, capture_output=True, text=True)
    assert finished.returncode == 0 and '--trust-remote-code' in finished.stdout, finished.stdout + finished.stderr
