"""Real runs of `xtuner train` with the hook: what they save is what they trained, and what XTuner's own hook saves.

Variable-length attention is not among the runs: XTuner asks for flash_attn before it reads the model, and
transformers finds flash_attn only where there is a GPU.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from mmengine.config import Config
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.xtuner_stack.elsewhere import logits_of
from tests.e2e.xtuner_stack.launches import (
    BESIDE_XTUNERS_HOOK,
    BEST,
    COMPOSITE,
    FIRST,
    FULL,
    INTERNLM2,
    INTERNVL,
    LAST,
    LLAVA_RUNS,
    LORA,
    QLORA,
    QWEN,
    RUNS,
    SMALL,
    WITHOUT_DEEPSPEED,
    export_of,
    log_of,
    saves_in,
)
from tests.helpers.checks.compare import (
    assert_loads_clean,
    assert_same_folder_tensors,
    assert_same_tensors,
    folder_tensors,
)
from tests.helpers.checks.converted import assert_same_files, config_of, convert
from tests.helpers.checks.pages import code
from tests.helpers.models.remote_code import use_modules_cache
from tests.helpers.models.zoo import MODELS, small_config
from tests.helpers.ranks.launch import REPO_ROOT
from tests.helpers.ranks.processes import MODERN_PYTHON

ADAPTERS = (LORA, QLORA)
ADAPTERS = tuple(name for name in ADAPTERS if name in RUNS)
WITH_REMOTE_CODE = (INTERNVL, COMPOSITE, INTERNLM2)
RESULTS = [name for name in RUNS if name not in (*LLAVA_RUNS, INTERNVL, COMPOSITE, BEST)]
PROMPT = 'w3 w4'


def zero_to_fp32(work_dir: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint; as it is where MMEngine wrote a file: without DeepSpeed, or without the optimizer."""
    file = work_dir / f'iter_{LAST}.pth'
    if file.is_file():
        return torch.load(file, map_location='cpu', weights_only=False)['state_dict']
    return get_fp32_state_dict_from_zero_checkpoint(str(work_dir), tag=f'iter_{LAST}.pth')


def trained(name: str, work_dir: Path) -> dict[str, torch.Tensor]:
    """What goes out of the last checkpoint, read by DeepSpeed's own converter where DeepSpeed wrote it."""
    weights = zero_to_fp32(work_dir)
    if name in ADAPTERS:
        return {key.replace('.default', '')[4:]: tensor for key, tensor in weights.items() if 'lora_' in key}
    if name == 'reward':
        return {re.sub('^llm', 'model', key).replace('v_head', 'score'): tensor for key, tensor in weights.items()}
    found = {key.removeprefix('llm.'): tensor for key, tensor in weights.items() if not key.startswith('ref_llm.')}
    if RUNS[name].base == 'qwen2':  # tied
        assert torch.equal(found.pop('lm_head.weight'), found['model.embed_tokens.weight'])
    return found


@pytest.mark.parametrize('name', RESULTS)
def test_what_was_trained_is_saved_when_checkpoint_hook_saves(runs, name):
    """Training moved every weight, else equal weights would prove little."""
    work_dir = runs.work_dir(name)
    steps = [f'iter_{LAST}'] if RUNS[name].resumes else [f'iter_{FIRST}', f'iter_{LAST}']
    assert saves_in(log_of(work_dir)) == steps == sorted(path.stem for path in work_dir.glob('iter_*.pth'))
    found, expected = folder_tensors(export_of(work_dir)), trained(name, work_dir)
    dtype = torch.float32 if name in WITHOUT_DEEPSPEED else torch.bfloat16
    assert found.keys() == expected.keys()
    assert [key for key, t in found.items() if t.dtype != dtype or not t.equal(expected[key].to(dtype))] == []
    base = {} if name in ADAPTERS else folder_tensors(runs.root / RUNS[name].base)
    assert [k for k, t in found.items() if not t.any() or (k in base and t.equal(base[k].to(dtype)))] == []


@pytest.mark.skipif('resumed' not in RUNS, reason='this transformers has no Qwen2')
def test_a_resumed_run_saves_what_an_uninterrupted_one_does(runs):
    assert_same_folder_tensors(export_of(runs.work_dir('resumed')), export_of(runs.work_dir(QWEN)))


def test_the_best_of_a_run_that_validates_and_chats(runs, tmp_path, monkeypatch):
    """Scored by rank 0's loss at each step; CheckpointHook has the same step's checkpoint, or none."""
    monkeypatch.chdir(runs.root)
    work_dir = runs.work_dir(BEST)
    (folder,) = work_dir.glob('*/hf_model_best')
    scores = re.findall(r'next_token_loss is (\S+)', runs.output(BEST))
    assert len(scores) == LAST and runs.output(BEST).count('after_val in EvaluateChatHook') >= LAST
    manifest = json.loads((folder / 'xhf_manifest.json').read_text())
    assert manifest['iteration'] == 1 + min(range(LAST), key=lambda step: float(scores[step]))
    assert_loads_clean(folder, AutoModelForCausalLM)
    if (checkpoint := work_dir / f'iter_{manifest["iteration"]}.pth').exists():
        assert_same_folder_tensors(convert(checkpoint, tmp_path / 'converted'), folder)


@pytest.mark.skipif(COMPOSITE not in RUNS, reason='this XTuner has no InternVL')
def test_a_composite_model_as_sa2va_builds_it(runs, tmp_path, monkeypatch, capsys):
    """The chat model goes out, merged, with the tokens that its tokenizer got, and what else is trained beside it."""
    use_modules_cache(tmp_path / 'modules', monkeypatch)
    monkeypatch.chdir(runs.root)
    work_dir = runs.work_dir(COMPOSITE)
    folder, weights = export_of(work_dir), zero_to_fp32(work_dir)
    found, base = folder_tensors(folder), folder_tensors(runs.root / 'internvl')
    assert found.keys() == base.keys()
    inner = 'mllm.model.'
    of_llm = f'{inner}language_model.base_model.model.'
    q_proj = 'language_model.model.layers.0.self_attn.q_proj'
    a, b = (weights[f'{of_llm}model.layers.0.self_attn.q_proj.lora_{x}.default.weight'] for x in 'AB')
    merged = base[f'{q_proj}.weight'].float() + 16 / 4 * b.bfloat16().float() @ a.bfloat16().float()
    assert b.any() and torch.equal(found[f'{q_proj}.weight'], merged.bfloat16())
    head = weights[f'{of_llm}lm_head.modules_to_save.default.weight'].bfloat16()
    assert torch.equal(found['language_model.lm_head.weight'], head)
    assert torch.equal(found['mlp1.1.weight'], weights[f'{inner}mlp1.1.weight'].bfloat16())
    assert 'trained, but not saved' not in log_of(work_dir)
    others = {n: tensor.bfloat16() for n, tensor in weights.items() if n.startswith(('text_hidden_fcs.', 'sam_mask_'))}
    assert len(others) == 8
    assert_same_tensors(load_file(folder / 'other_modules' / 'model.safetensors'), others)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert '[SEG]' in tokenizer.get_vocab() and len(tokenizer) == len(head)
    model, report = AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.llm_config.vocab_size == len(head)
    assert_same_tensors(
        merged_as_by_sa2va(work_dir, folder, tmp_path / 'other_modules.pth'),
        {**others, **{f'{inner}{name}': tensor for name, tensor in found.items()}},
    )
    # The run says as much: its save lends the tokenizer with the added tokens, and the base that the config names the
    # frozen weights, into which the adapter of the checkpoint is merged once
    assert_same_files(convert(work_dir, tmp_path / 'whole', '--trust-remote-code'), folder)
    told = capsys.readouterr().err
    assert 'all that it has of other modules is written: 8 tensors' in told
    assert f'the tokenizer is that of {folder}' in told
    # The checkpoint alone lacks the tokens, which the class added
    shutil.copytree(work_dir, tmp_path / 'run', ignore=shutil.ignore_patterns('hf_model'))
    converted = convert(tmp_path / 'run', tmp_path / 'converted', '--trust-remote-code')
    assert_same_folder_tensors(converted, folder)
    assert config_of(converted) == config_of(folder)
    told = capsys.readouterr().err
    assert f'the tokenizer has 131 tokens, but the embeddings were resized from 131 to {len(head)} rows' in told


def merged_as_by_sa2va(work_dir: Path, folder: Path, file: Path) -> dict[str, torch.Tensor]:
    """What Sa2VA's tools/convert_to_hf.py makes of a save: with its path in the config, and as docs/xtuner.md says."""
    from xtuner.registry import BUILDER

    config = Config.fromfile(work_dir / f'{work_dir.name}.py').model
    config.mllm.model_path = config.tokenizer.pretrained_model_name_or_path = str(folder)
    model = BUILDER.build(config)
    assert len(model.tokenizer) == model.mllm.model.config.llm_config.vocab_size, 'its tokens are there already'
    lines = code('other_modules.pth', 'xtuner.md').replace("'hf_model/", f"'{folder}/")
    exec(lines.replace("'other_modules.pth'", repr(str(file))), {})
    unknown = model.load_state_dict(torch.load(file)['state_dict'], strict=False).unexpected_keys
    assert unknown == []
    model.mllm.model.language_model = model.mllm.model.language_model.merge_and_unload()
    model.to(torch.bfloat16)
    return {name: tensor for name, tensor in nn.Module.state_dict(model).items() if 'grounding_encoder' not in name}


def test_zero3_partitioned_what_was_saved(runs):
    """DeepSpeed's log says how many parameters it did not partition: of Llama's 21 all but the embeddings."""
    for name, n_whole in ((FULL, 19), (LORA, 0)):
        assert re.findall(r'Total persistent parameters: \d+ in (\d+) params', runs.output(name))[0] == str(n_whole)


def save_pretrained_loses_views() -> bool:
    """Transformers before 4.40 takes tensors in one storage for shared ones, as all are in DeepSpeed's flat buffer."""
    model = transformers.BertModel(small_config(*MODELS['bert']))
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    at = 0
    for parameter in model.parameters():
        parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return len(folder_tensors(folder)) < len(list(model.parameters()))


@pytest.mark.skipif(find_spec('xtuner.utils.zero_to_any_dtype') is None, reason='this XTuner reads fp32')
def test_xtuners_converter_rounds_float32_to_float16(runs, tmp_path, monkeypatch):
    """`xtuner convert pth_to_hf --fp32` on the checkpoint of which `xhf-convert --dtype float32` gives every bit."""
    monkeypatch.chdir(runs.root)
    work_dir = runs.work_dir(QWEN)
    arguments = [f'{QWEN}.py', str(work_dir / f'iter_{LAST}.pth'), str(tmp_path / 'theirs'), '--fp32']
    monkeypatch.setattr(sys, 'argv', ['pth_to_hf', *arguments, '--safe-serialization'])
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')  # it reads as torch before 2.6 did
    runpy.run_module('xtuner.tools.model_converters.pth_to_hf', run_name='__main__')
    theirs, expected = folder_tensors(tmp_path / 'theirs'), trained(QWEN, work_dir)
    ours = folder_tensors(convert(work_dir, tmp_path / 'ours', '--dtype', 'float32'))
    assert ours.keys() == expected.keys() == theirs.keys() - {'lm_head.weight'}  # tied
    assert all(torch.equal(ours[key], tensor) for key, tensor in expected.items())
    assert all(torch.equal(theirs[key], tensor.half().float()) for key, tensor in expected.items())
    assert not any(torch.equal(theirs[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize('name', BESIDE_XTUNERS_HOOK)
def test_same_bytes_as_xtuners_own_hook(runs, name):
    work_dir = runs.work_dir(name)
    if RUNS[name].deepspeed == 'deepspeed_zero2' and save_pretrained_loses_views():
        ours, theirs = folder_tensors(export_of(work_dir)), folder_tensors(work_dir / 'hf_model')
        assert (len(theirs), len(ours)) == (1, 21), 'XTuner logs "Removed shared tensor", and no more'
        assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
        return
    assert_same_folder_tensors(export_of(work_dir), work_dir / 'hf_model')
    if name == LORA:
        ours, theirs = (at / 'adapter_config.json' for at in (export_of(work_dir), work_dir / 'hf_model'))
        assert json.loads(ours.read_text()) == json.loads(theirs.read_text())


@pytest.mark.parametrize('name', RESULTS)
def test_loads_and_generates(runs, name, tmp_path, monkeypatch):
    use_modules_cache(tmp_path / 'modules', monkeypatch)
    monkeypatch.chdir(runs.root)  # an adapter's base
    folder = export_of(runs.work_dir(name))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name in ADAPTERS:
        model = AutoPeftModelForCausalLM.from_pretrained(folder)
    else:
        kind = AutoModelForSequenceClassification if name == 'reward' else AutoModelForCausalLM
        model = assert_loads_clean(folder, kind, trust_remote_code=name == INTERNLM2)
    prompt = tokenizer(PROMPT, return_tensors='pt')
    if name == 'reward':
        assert model.config.pad_token_id == 0 and model(**prompt).logits.shape == (1, 1)
        return
    assert len(tokenizer) == model.config.vocab_size
    if name not in ADAPTERS:
        said = json.loads((folder / 'config.json').read_text())['use_cache']
        assert said is True, 'XTuner sets it to False on the live config'
    if name == INTERNLM2:  # its code cannot generate in transformers 4.57
        assert model(**prompt).logits.isfinite().all()
        return
    generated = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert generated.shape[1] == prompt['input_ids'].shape[1] + 5


@pytest.mark.skipif(INTERNVL not in RUNS, reason='this XTuner has no InternVL')
def test_internvl_is_saved_with_its_code_and_loads(runs, tmp_path, monkeypatch):
    """Which cannot be built on the meta device as it is."""
    use_modules_cache(tmp_path / 'modules', monkeypatch)
    monkeypatch.chdir(runs.root)
    folder = export_of(runs.work_dir(INTERNVL))
    assert saves_in(log_of(runs.work_dir(INTERNVL))) == [f'iter_{FIRST}', f'iter_{LAST}']
    base, found = folder_tensors(runs.root / 'internvl'), folder_tensors(folder)
    assert found.keys() == base.keys()
    moved = {name for name, tensor in found.items() if not tensor.equal(base[name])}
    assert moved == {name for name in base if not name.startswith('vision_model.')}  # which the config freezes
    model, report = AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), report
    assert len(model.vision_model.dpr) == model.config.vision_config.num_hidden_layers


@pytest.mark.skipif(QLORA not in RUNS, reason='this transformers loads no 4-bit weights here')
def test_a_qlora_run_is_merged_and_talks(runs, tmp_path, monkeypatch, capsys):
    """By the commands of docs/xtuner.md: the base is not the quantized one, but that of its files."""
    monkeypatch.chdir(runs.root)
    work_dir, base = runs.work_dir(QLORA), RUNS[QLORA].base
    adapter, weights = export_of(work_dir), folder_tensors(runs.root / base)
    ours = folder_tensors(convert(work_dir, tmp_path / 'ours', '--lora', 'merge'))
    assert_loads_clean(tmp_path / 'ours', AutoModelForCausalLM)
    theirs = tmp_path / 'theirs'
    run_tool(monkeypatch, 'model_converters.merge', base, adapter, theirs, '--device', 'cpu', '--safe-serialization')
    lora = json.loads((adapter / 'adapter_config.json').read_text())
    factors = folder_tensors(adapter)
    moved = {name for name in weights if f'base_model.model.{name[:-7]}.lora_A.weight' in factors}
    assert len(moved) == len(factors) // 2 > 0
    for name, found in ours.items():
        expected = weights[name].bfloat16().float()  # as training had it
        if name in moved:
            a, b = (factors[f'base_model.model.{name[:-7]}.lora_{x}.weight'].float() for x in 'AB')
            expected = expected + lora['lora_alpha'] / lora['r'] * b @ a
        assert torch.equal(found, expected.to(found.dtype)), name
    for name, found in folder_tensors(theirs).items():  # in fp16, in which it computes
        torch.testing.assert_close(found.float(), ours[name].float(), rtol=2e-2, atol=2e-3)

    answers = iter([PROMPT, '', 'EXIT', ''])
    monkeypatch.setattr('builtins.input', lambda *_: next(answers))
    monkeypatch.setattr(torch.Tensor, 'cuda', lambda self: self)
    options = ['--adapter', adapter, '--torch-dtype', 'fp32', '--prompt-template', 'llama3_chat']
    with pytest.raises(SystemExit) as ended:
        run_tool(monkeypatch, 'chat', base, *options, '--max-new-tokens', '4')
    assert ended.value.code == 0 and f'Load adapter from {adapter}' in capsys.readouterr().out


def run_tool(monkeypatch, name: str, *arguments: str | Path) -> None:
    """`xtuner TOOL ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, 'argv', [name, *map(str, arguments)])
    runpy.run_module(f'xtuner.tools.{name}', run_name='__main__')


@pytest.mark.parametrize('name', [name for name in RUNS if name not in (BEST, COMPOSITE)])
def test_a_converted_checkpoint_is_the_hooks_export(runs, name, tmp_path, monkeypatch):
    """The config is the checkpoint's own text; the checkpoint is found through `last_checkpoint`.

    What the checkpoint lacks, such as weights under an adapter, comes from the base that its config names.
    """
    use_modules_cache(tmp_path / 'modules', monkeypatch)
    monkeypatch.chdir(runs.root)
    work_dir = runs.work_dir(name)
    options = ['--verify', 'full', *([] if name == INTERNVL else ['--max-shard-size', '40KB'])]
    if name in WITH_REMOTE_CODE:
        options.append('--trust-remote-code')
    assert_same_files(convert(work_dir, tmp_path / 'converted', *options), export_of(work_dir))


@pytest.mark.needs('the modern environment')
def test_converted_and_read_where_transformers_is_new(runs, tmp_path):
    """As who trained with XTuner a year ago, and has the newest transformers today."""
    names = [name for name in (FULL, QWEN, LORA, 'one_process') if name in RUNS]
    work_dirs = [runs.work_dir(name) for name in names]
    program = [str(MODERN_PYTHON), str(REPO_ROOT / 'tests' / 'e2e' / 'xtuner_stack' / 'elsewhere.py'), str(tmp_path)]
    environment = dict(os.environ, PYTHONPATH=str(REPO_ROOT), HF_HUB_OFFLINE='1')
    environment.pop('TORCH_EXTENSIONS_DIR', None)
    done = subprocess.run([*program, *work_dirs], cwd=runs.root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    logits = torch.load(tmp_path / 'logits.pt')
    for name, work_dir in zip(names, work_dirs, strict=True):
        assert_same_folder_tensors(tmp_path / name, export_of(work_dir))
        assert (name in logits) == (name != LORA)
        if name in logits:
            torch.testing.assert_close(logits[name], logits_of(export_of(work_dir)), rtol=1e-4, atol=1e-4)


def test_an_older_checkpoint_by_a_config_that_nobody_ran(runs, tmp_path, monkeypatch, capsys):
    """The lazy config that the user wrote is read, and what it imports is not imported. One with edits is refused."""
    from xhf_hooks.offline.commands.convert import main

    monkeypatch.chdir(runs.root)
    work_dir, plain = runs.work_dir(FULL), tmp_path / 'plain.py'
    checkpoint, written = work_dir / f'iter_{FIRST}.pth', runs.small_config(FULL)
    edited = runs.root / f'{FULL}.py'
    assert edited.read_text() == written and SMALL in written
    assert main([str(checkpoint), str(tmp_path / 'out'), '--config', str(edited)]) == 2
    told = (
        f'is no plain assignment, and is not run; leave --config out: {checkpoint} has the config that MMEngine dumped'
    )
    assert told in capsys.readouterr().err
    plain.write_text(written[: written.index(SMALL)])
    found = convert(checkpoint, tmp_path / 'out', '--config', plain)
    assert json.loads((found / 'xhf_manifest.json').read_text())['iteration'] == FIRST
    for name in ('config.json', 'tokenizer_config.json', 'generation_config.json'):
        assert (found / name).read_bytes() == (export_of(work_dir) / name).read_bytes()
