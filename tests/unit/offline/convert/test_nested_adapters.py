"""Adapters on parts of a model below prefixes, as in Sa2VA: the run's config alone tells how they were made."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.checks.converted import assert_same_files, checkpoint_of, config_of, convert, refused
from tests.helpers.models.adapted import adapt, around
from tests.helpers.models.model_folder import resize_embeddings, save_tokenizer
from tests.helpers.models.remote_code import use_modules_cache
from tests.helpers.models.zoo import build
from tests.helpers.models.zoo.internvl import load_internvl
from xhf_hooks import save_hf

WHOLE = dict(r=4, lora_alpha=12, target_modules=['q_proj', 'v_proj'], modules_to_save=['embed_tokens', 'lm_head'])
#: LoraConfigs by the name of the option that has them, and by the part that they adapt.
ADAPTERS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    'llm': {'lora': ('language_model', WHOLE)},
    'both': {
        'llm_lora': ('language_model', dict(r=4, lora_alpha=12, target_modules=['q_proj', 'v_proj'])),
        'visual_encoder_lora': ('vision_model', dict(r=4, lora_alpha=7, target_modules=['k_proj'])),
    },
}


class Run:
    """A chat model of remote code below two prefixes, and a frozen encoder beside; its checkpoint has what was trained.

    MMEngine's DeepSpeedStrategy saves nothing else.
    """

    def __init__(self, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        use_modules_cache(folder / 'modules', monkeypatch)
        self.base, self.adapters, self.folder = folder / 'internvl', ADAPTERS[kind], folder / 'run'
        chat = load_internvl(self.base)
        n_rows = chat.language_model.get_input_embeddings().weight.shape[0]
        save_tokenizer(self.base, n_rows)
        chat.vision_model.requires_grad_(False)
        if kind == 'llm':
            resize_embeddings(chat.language_model, n_rows + 3)
        for name, (part, lora) in self.adapters.items():
            task = None if name == 'visual_encoder_lora' else 'CAUSAL_LM'
            setattr(chat, part, adapt(getattr(chat, part), task_type=task, **lora))
        encoder = torch.nn.Linear(3, 3).requires_grad_(False)
        self.live = around(mllm=around(model=chat), encoder=encoder, projection=torch.nn.Linear(3, 3))
        self.checkpoint = checkpoint_of(self.live, self.folder)

    def write_config(self, of_mllm: str = '', **more: Any) -> None:
        """As MMEngine dumps it; a str is an expression.

        Args:
            of_mllm: More fields of the chat model's config.
        """
        loras = {name: lora for name, (_, lora) in self.adapters.items()} | more
        texts = [f'{name}={lora}' if isinstance(lora, str) else _lora_text(name, lora) for name, lora in loras.items()]
        mllm = f"mllm=dict(type='my.Chat', freeze_llm=True, freeze_visual_encoder=True, {of_mllm})"
        text = f"model = dict(type='my.Grounding', {mllm}, {', '.join(texts)})\n"
        (self.folder / 'config.py').write_text(text)


def _lora_text(name: str, lora: dict[str, Any]) -> str:
    options = ', '.join(f'{option}={value!r}' for option, value in lora.items())
    return f"{name}=dict(type='peft.LoraConfig', {options})"


@pytest.mark.parametrize('kind', [*ADAPTERS])
def test_adapted_parts_are_merged_as_by_the_hook(kind, tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, kind, monkeypatch)
    run.write_config()
    save_hf(run.live, tmp_path / 'hook', module='mllm.model')
    out = convert(run.checkpoint, tmp_path / 'out', '--base', run.base, '--trust-remote-code')
    said = capsys.readouterr().err
    assert 'projection.weight' in said
    if kind == 'both':
        assert_same_files(out, tmp_path / 'hook')
    else:  # nobody saved the tokenizer to which tokens were added
        assert_same_folder_tensors(out, tmp_path / 'hook')
        assert config_of(out) == config_of(tmp_path / 'hook')
        assert 'but the embeddings were resized from' in said


@pytest.mark.parametrize('kind', [*ADAPTERS])
def test_a_save_of_the_run_lends_its_config_and_tokenizer_and_no_weights(kind, tmp_path, monkeypatch, capsys):
    """Adapters are merged in it already: with its weights they would be merged twice."""
    run = Run(tmp_path, kind, monkeypatch)
    saved = run.folder / '20261128_101010' / 'hf_model'
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.base)
    resizes = kind == 'llm'
    if resizes:
        tokenizer.add_tokens(['[SEG]', '<p>', '</p>'])
    build('llama').save_pretrained(tmp_path / 'llama')
    encoder = f"dict(type='my.Encoder', pretrained_model_name_or_path='{tmp_path / 'llama'}')"  # frozen
    run.write_config(f"model_path='{run.base}'", encoder=encoder)
    alone = convert(run.checkpoint, tmp_path / 'alone', '--trust-remote-code')
    save_hf(run.live, saved, module='mllm.model', tokenizer=tokenizer)
    assert_same_folder_tensors(alone, saved)
    capsys.readouterr()
    out = convert(run.checkpoint, tmp_path / 'out', '--trust-remote-code')
    said = capsys.readouterr().err
    assert f'not in the checkpoint, read from {run.base}' in said
    assert_same_folder_tensors(out, saved)
    assert config_of(out) == config_of(saved)
    assert ('[SEG]' in transformers.AutoTokenizer.from_pretrained(out).get_vocab()) == resizes
    assert (f'the tokenizer is that of {saved}' in said) == resizes
    run.write_config("model_path='/moved/away'")
    line = refused(capsys, run.checkpoint, tmp_path / 'none', '--trust-remote-code')
    assert f'and {saved}, a save of this run, lends no weights' in line and '--base has to name the model' in line


def test_the_remedy_for_custom_code_comes_first(tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, 'llm', monkeypatch)
    run.write_config(f"model_path='{run.base}'")
    line = refused(capsys, run.checkpoint, tmp_path / 'out')
    assert line.startswith('xhf-convert: add --trust-remote-code if you trust')


def test_what_the_config_does_not_tell(tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, 'llm', monkeypatch)
    command = [run.checkpoint, tmp_path / 'out', '--base', run.base, '--trust-remote-code']
    run.write_config(lora="dict(type='peft.LoraConfig', r=4, lora_alpha=2 * ALPHA, target_modules=['q_proj'])")
    assert 'they are of peft' in refused(capsys, *command), 'other modules'
    run.write_config(lora=str(_lora_text('lora', WHOLE).removeprefix('lora=').replace('=12', '=2 * ALPHA')))
    assert "line 1: model.lora.lora_alpha is '2 * ALPHA', which is not run" in refused(capsys, *command)
    run.write_config(lora=str(_lora_text('lora', WHOLE).removeprefix('lora=').replace("['", "[OTHER, '", 1)))
    assert "line 1: model.lora.target_modules.0 is 'OTHER', which is not run" in refused(capsys, *command)
    run.write_config(other={**WHOLE, 'lora_alpha': 99})
    line = refused(capsys, *command)
    assert 'language_model may be made from 2 LoraConfigs: model.lora and model.other' in line
    run.write_config(other=WHOLE)
    convert(*command)
