"""The README is executable: its commands run, its code blocks work, its trees are what comes out."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / 'README.md').read_text(encoding='utf-8')
MEASURED = ['verify', 'save', 'stall', 'plan', 'convert']
CONVERSIONS = [f'python tools/convert.py CHECKPOINT OUT {option}' for option in ('--dry-run', '--verify')]
LONG_RUNS = ['python tools/kill_test.py --kills 240', 'python tools/network_fs_test.py --saves 200']
FUZZERS = [f'python tools/fuzz.py {what} --mutants 10000' for what in ('convert', 'verify')]
VERIFYING = ['python tools/verify.py DIR', 'python tools/verify.py A B']
BENCHMARKS = [f'python tools/bench.py {what}' for what in MEASURED]
ENTER = 'source tools/env.sh && use_env .venv'
#: A shell in which nothing was set up.
BARE = {'PATH': '/usr/local/bin:/usr/bin:/bin', 'HOME': '/nonexistent'}
XTUNERS = 'source tools/env.sh && use_env .venv-xtuner'
COMMANDS = [
    *('bash tools/demo.sh', 'bash tools/test.sh', ENTER, *LONG_RUNS, *FUZZERS, *VERIFYING),
    *(*BENCHMARKS[:4], *CONVERSIONS, XTUNERS, BENCHMARKS[4]),
]


def blocks(language: str) -> list[str]:
    return re.findall(rf'^```{language}\n(.*?)^```$', README, flags=re.MULTILINE | re.DOTALL)


def code(containing: str) -> str:
    (found,) = [block for block in blocks('python') if containing in block]
    return found


@pytest.fixture(scope='module')
def demo_folder():
    """What `bash tools/demo.sh` leaves; it checks by itself that the loss fell and the folder generates."""
    finished = subprocess.run(['bash', 'tools/demo.sh'], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    assert 'Loss:' in finished.stdout and 'What the saves cost:' in finished.stdout
    return max((ROOT / 'work_dirs' / 'demo').glob('*/hf_model'))


def test_every_command_is_known_here():
    assert [line for block in blocks('bash') for line in block.splitlines()] == COMMANDS


def test_ci_runs_the_test_command():
    assert 'bash tools/test.sh' in (ROOT / '.ci' / 'run').read_text()


@pytest.mark.modern_only
def test_the_demo_leaves_the_tree(demo_folder):
    (tree,) = [block for block in blocks('text') if block.startswith('work_dirs/demo')]
    names = re.findall(r'^ {8}(\S+)', tree, flags=re.MULTILINE)
    assert sorted(names) == sorted(path.name for path in demo_folder.iterdir())


@pytest.mark.modern_only
def test_the_loading_lines_load_it(demo_folder):
    lines = code('from_pretrained(').replace('work_dirs/demo/<timestamp>/hf_model', str(demo_folder))
    subprocess.run([sys.executable, '-c', lines], check=True)


@pytest.mark.parametrize('words', ["dict(type='HFCheckpointHook')", 'interval=500'])
def test_the_config_lines_configure_the_hook(words):
    from mmengine.config import Config
    from mmengine.registry import HOOKS

    from xhf_hooks import HFCheckpointHook

    config = Config.fromstring(code(words), '.py')
    assert isinstance(HOOKS.build(config.custom_hooks[0]), HFCheckpointHook)


def test_the_import_to_change_is_xtuners_name():
    (lines,) = blocks('diff')
    before, after = lines.splitlines()
    assert before == '-from xtuner.engine.hooks import HFCheckpointHook'
    namespace: dict[str, object] = {}
    exec(after.removeprefix('+'), namespace)
    from xhf_hooks import HFCheckpointHook

    assert namespace['HFCheckpointHook'] is HFCheckpointHook


def test_what_the_readme_counts_of_xtuners_configs():
    """docs/xtuner_configs.md is compared with the configs themselves in XTuner's environment."""
    table = (ROOT / 'docs' / 'xtuner_configs.md').read_text()
    rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in table.splitlines() if line.startswith('| ')]
    counts: dict[str, int] = {}
    for _, _, exporter, count, _ in rows[1:-1]:
        kind = exporter.split(':')[0] if 'Trainer' not in exporter else 'Trainer'
        counts[kind] = counts.get(kind, 0) + int(count)
    _, _, _, n_configs, n_templates = rows[-1]
    trainer = counts.pop('Trainer')
    words = ' '.join(README.split())
    assert f'Of the {n_configs} configs that come with XTuner {sum(counts.values())} are saved' in words
    assert f'{trainer} are for' in words and 'none' not in counts
    assert f'({n_templates} do)' in words
    assert 'seven of' in README and len(list((ROOT / 'configs' / 'xtuner').glob('*.py'))) == 7


def test_the_page_of_options_is_made_from_their_descriptions():
    from tools.options_page import page

    assert (ROOT / 'docs' / 'options.md').read_text() == page()


def accelerate_loop(lines: str, folder: Path) -> str:
    """The loop of the README at ZeRO-3. Runs on: all ranks.

    Without an accelerator Accelerate does not know of the other ranks: each gets all 16 batches.
    """
    import torch
    from transformers import PreTrainedTokenizerFast

    from tests.helpers import frontends as doors
    from tests.helpers.zero_config import zero_config
    from tests.helpers.zoo.llamas import odd_llama

    config = folder / 'zero3.json'
    config.write_text(json.dumps(zero_config(3)))
    model = odd_llama()
    names = dict(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loader=torch.utils.data.DataLoader(doors.Sequences()),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=_tokenizer()),
    )
    with doors.fresh_accelerate(ACCELERATE_USE_DEEPSPEED='true', ACCELERATE_DEEPSPEED_CONFIG_FILE=str(config)):
        exec(lines.replace("'out/hf_model'", repr(str(folder / 'hf_model'))).replace('500', '3'), names)
        found = type(names['model']).__name__
        names['model'].destroy()
    return found


def _tokenizer():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({'<unk>': 0, 'a': 1}, unk_token='<unk>'))


@pytest.mark.modern_only
def test_the_accelerate_loop_saves(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.helpers.frontends import verify_folder
    from tests.helpers.ranks import run_ranks

    assert len(code('Accelerator').splitlines()) <= 12
    assert run_ranks(accelerate_loop, 2, code('Accelerator'), tmp_path) == ['DeepSpeedEngine'] * 2
    assert verify_folder(tmp_path / 'hf_model') >= 4
    assert json.loads((tmp_path / 'hf_model' / 'xhf_manifest.json').read_text())['iteration'] == 15
    assert AutoTokenizer.from_pretrained(tmp_path / 'hf_model').convert_tokens_to_ids('a') == 1
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / 'hf_model', output_loading_info=True)
    assert not any(report.values())


@pytest.mark.modern_only
def test_the_callback_lines_make_a_callback():
    names: dict = {}
    exec(code('HFCheckpointCallback'), names)
    assert type(names['callbacks'][0]).__name__ == 'HFCheckpointCallback'


def test_the_example_exporter_is_chosen():
    from torch import nn

    from tests.helpers.zoo import build
    from xhf_hooks.exporters import exporter_for
    from xhf_hooks.registry import EXPORTERS
    from xhf_hooks.sources import source_for

    model = nn.Module()
    model.policy, model.reference = build('llama'), build('llama')
    before = set(EXPORTERS.module_dict)
    try:
        exec(code('class PolicyExporter'), {})
        exporter = exporter_for(model, None)
        assert type(exporter).__name__ == 'PolicyExporter'
        entries = exporter.entries(source_for(model).specs(), None)
        assert {read for entry in entries for read in entry.reads} == {
            f'policy.{name}' for name, _ in model.policy.named_parameters()
        }
    finally:
        for name in set(EXPORTERS.module_dict) - before:
            del EXPORTERS.module_dict[name]


@pytest.mark.modern_only
@pytest.mark.parametrize('what', sorted(file.stem for file in (ROOT / 'docs' / 'bench').glob('*.json')))
def test_the_table_is_the_one_measured(monkeypatch, what):
    """docs/bench/WHAT.json is what the benchmark wrote when the table in README or docs was made."""
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    from bench.report import table

    measured = json.loads((ROOT / 'docs' / 'bench' / f'{what}.json').read_text())
    pages = [README, *(page.read_text() for page in (ROOT / 'docs').glob('*.md'))]
    assert any(table(what, measured).strip() in page for page in pages)
    assert what not in MEASURED or what == 'plan' or measured['repeats'] >= 5


def test_the_tests_that_are_named_are_there():
    there = {path.stem for path in (ROOT / 'tests').rglob('test_*.py')}
    assert not set(re.findall(r'\[(test_\w+)\]', README)) - there


@pytest.mark.modern_only
def test_the_kill_command_runs(monkeypatch, capsys):
    """In this process, whose server of ranks has the imports done."""
    command = [*LONG_RUNS[0].split()[1:-1], '4']
    monkeypatch.setattr(sys, 'argv', command)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / command[0]), run_name='__main__')
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert '4 runs killed' in said and '0 lost, 0 partial' in said


@pytest.mark.modern_only
def test_the_benchmark_runs_outside_of_the_environment(monkeypatch, tmp_path):
    """By its Python's path alone: torchrun and ninja are not on PATH."""
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    from bench.ways import BY, FLOOR_SENT, SENDERS

    command = [sys.executable, 'tools/bench.py', 'save', '--billions', '0.05', '--repeats', '1', '--in-a-row', '1']
    finished = subprocess.run([*command, '--out', str(tmp_path)], cwd=ROOT, env=BARE, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.startswith('0.05 B parameters'), 'what is pasted into the README is the table alone'
    assert finished.stderr.startswith('save: about '), 'how long it will take, before it starts'
    (size,) = json.loads((tmp_path / 'save.json').read_text())['sizes']
    share = {way: runs[0]['sent_mb'] * 1e6 / size['nbytes'] for way, runs in size['runs'].items()}
    assert share['xhf_hooks positional, with fsync, as the hook'] < 0.01
    for how in SENDERS:  # rank 1 sends its half, and nobody anything else
        assert share[f'{FLOOR_SENT}{BY}{how}'] == pytest.approx(0.5, abs=0.01)
    assert '<svg' in (tmp_path / 'save.svg').read_text()


@pytest.mark.modern_only
def test_the_line_that_enters_the_environment(tmp_path):
    """From a shell that knows nothing of it. Without the environment it says so, and leaves PATH alone."""
    (tmp_path / 'env').symlink_to(sys.prefix)
    enter = ENTER.replace('.venv', str(tmp_path / 'env'))
    lines = f'{enter} && command -v torchrun ninja && python tools/verify.py --help'
    finished = subprocess.run(['bash', '-c', lines], cwd=ROOT, env=BARE, capture_output=True, text=True)
    assert finished.returncode == 0 and '--trust-remote-code' in finished.stdout, finished.stdout + finished.stderr
    lines = f'{ENTER.replace(".venv", "no-env")} || echo "$PATH"'
    finished = subprocess.run(['bash', '-c', lines], cwd=ROOT, env=BARE, capture_output=True, text=True)
    assert 'no-env' in finished.stderr and finished.stdout.strip() == BARE['PATH']
