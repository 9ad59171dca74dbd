"""Real runs of `xtuner train` with the hook: what they save is what they trained, and what XTuner's own hook saves.

Variable-length attention is not among the runs: XTuner asks for flash_attn before it reads the model, and
transformers finds flash_attn only where there is a GPU.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from peft import AutoPeftModelForCausalLM
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.xtuner_stack.launches import (
    BESIDE_XTUNERS_HOOK,
    DPO,
    FIRST,
    FULL,
    INTERNVL,
    LAST,
    LLAVA_RUNS,
    LORA,
    QLORA,
    QWEN,
    RUNS,
    export_of,
    log_of,
    saves_in,
)
from tests.helpers.checks.compare import assert_loads_clean, assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.converted import assert_same_files, convert
from tests.helpers.models.remote_code import use_modules_cache

ADAPTERS = (LORA, QLORA)
RESULTS = [name for name in RUNS if name not in (*LLAVA_RUNS, INTERNVL)]
PROMPT = 'w3 w4'


def trained(name: str, work_dir: Path) -> dict[str, torch.Tensor]:
    """What goes out of the last checkpoint, read by DeepSpeed's own converter where DeepSpeed wrote it."""
    weights = get_fp32_state_dict_from_zero_checkpoint(str(work_dir), tag=f'iter_{LAST}.pth')
    if name in ADAPTERS:
        return {key.replace('.default', '')[4:]: tensor for key, tensor in weights.items() if 'lora_' in key}
    if name == 'reward':
        return {re.sub('^llm', 'model', key).replace('v_head', 'score'): tensor for key, tensor in weights.items()}
    found = {key.removeprefix('llm.'): tensor for key, tensor in weights.items() if not key.startswith('ref_llm.')}
    if name in (QWEN, DPO):  # tied
        assert torch.equal(found.pop('lm_head.weight'), found['model.embed_tokens.weight'])
    return found


@pytest.mark.parametrize('name', RESULTS)
def test_what_was_trained_is_saved_when_checkpoint_hook_saves(runs, name):
    """Training moved every weight, else equal weights would prove little."""
    work_dir = runs.work_dir(name)
    steps = [f'iter_{FIRST}', f'iter_{LAST}']
    assert saves_in(log_of(work_dir)) == steps == sorted(path.stem for path in work_dir.glob('iter_*.pth'))
    found, expected = folder_tensors(export_of(work_dir)), trained(name, work_dir)
    dtype = torch.bfloat16
    assert found.keys() == expected.keys()
    assert [key for key, t in found.items() if t.dtype != dtype or not t.equal(expected[key].to(dtype))] == []
    base = {} if name in ADAPTERS else folder_tensors(runs.root / RUNS[name].base)
    assert [k for k, t in found.items() if not t.any() or (k in base and t.equal(base[k].to(dtype)))] == []


def test_zero3_partitioned_what_was_saved(runs):
    """DeepSpeed's log says how many parameters it did not partition: of Llama's 21 all but the embeddings."""
    for name, n_whole in ((FULL, 19), (QWEN, 0)):
        assert re.findall(r'Total persistent parameters: \d+ in (\d+) params', runs.output(name))[0] == str(n_whole)


@pytest.mark.parametrize('name', BESIDE_XTUNERS_HOOK)
def test_same_bytes_as_xtuners_own_hook(runs, name):
    work_dir = runs.work_dir(name)
    assert_same_folder_tensors(export_of(work_dir), work_dir / 'hf_model')
    if name == LORA:
        ours, theirs = (at / 'adapter_config.json' for at in (export_of(work_dir), work_dir / 'hf_model'))
        assert json.loads(ours.read_text()) == json.loads(theirs.read_text())


@pytest.mark.parametrize('name', [name for name in RESULTS if name != QLORA])  # its base wants a GPU
def test_loads_and_generates(runs, name, monkeypatch):
    monkeypatch.chdir(runs.root)  # an adapter's base
    folder = export_of(runs.work_dir(name))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name == LORA:
        model = AutoPeftModelForCausalLM.from_pretrained(folder)
    else:
        kind = AutoModelForSequenceClassification if name == 'reward' else AutoModelForCausalLM
        model = assert_loads_clean(folder, kind)
    prompt = tokenizer(PROMPT, return_tensors='pt')
    if name == 'reward':
        assert model.config.pad_token_id == 0 and model(**prompt).logits.shape == (1, 1)
        return
    assert len(tokenizer) == model.config.vocab_size
    if name != LORA:
        said = json.loads((folder / 'config.json').read_text())['use_cache']
        assert said is True, 'XTuner sets it to False on the live config'
    generated = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert generated.shape[1] == prompt['input_ids'].shape[1] + 5


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


@pytest.mark.parametrize('name', RUNS)
def test_a_converted_checkpoint_is_the_hooks_export(runs, name, tmp_path, monkeypatch):
    """The config is the checkpoint's own text; the checkpoint is found through `last_checkpoint`.

    What the checkpoint lacks, such as weights under an adapter, comes from the base that its config names.
    """
    use_modules_cache(tmp_path / 'modules', monkeypatch)
    monkeypatch.chdir(runs.root)
    work_dir = runs.work_dir(name)
    options = ['--max-shard-size', '40KB', '--verify']
    if name == INTERNVL:
        options = ['--base', 'internvl', '--trust-remote-code']
    assert_same_files(convert(work_dir, tmp_path / 'converted', *options), export_of(work_dir))


def test_an_older_checkpoint_by_a_config_that_nobody_ran(runs, tmp_path, monkeypatch):
    """The lazy config that the user wrote is read, and what it imports is not imported."""
    monkeypatch.chdir(runs.root)
    work_dir = runs.work_dir(QWEN)
    found = convert(work_dir / f'iter_{FIRST}.pth', tmp_path / 'out', '--config', runs.root / f'{QWEN}.py')
    assert json.loads((found / 'xhf_manifest.json').read_text())['iteration'] == FIRST
    for name in ('config.json', 'tokenizer_config.json', 'generation_config.json'):
        assert (found / name).read_bytes() == (export_of(work_dir) / name).read_bytes()
