"""What a run left beside its checkpoint, what its config names, and the base: which is written, and what is said."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from tests.helpers.checks.config_fields import dtype_in
from tests.helpers.checks.converted import assert_same_files, base_of, checkpoint_of, convert, refused
from tests.helpers.models.adapted import adapt
from tests.helpers.models.model_folder import edit_json, save_tokenizer, write_manifest
from tests.helpers.models.zoo import build
from tests.helpers.runs.made_checkpoint import MadeCheckpoint
from xhf_hooks import save_hf
from xhf_hooks.compat.transformers import converts_weights
from xhf_hooks.offline.commands.convert import main
from xhf_hooks.offline.convert.conversion import Conversion

OWN = 'OF TRAINING'


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp('base') / 'base'
    build('llama').save_pretrained(folder)
    save_tokenizer(folder, 131)
    return folder


def leave(folder: Path, base: Path) -> None:
    """Leave in a folder what a script saves of its own beside a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ('config.json', 'tokenizer.json', 'tokenizer_config.json'):
        shutil.copy(base / name, folder)
    edit_json(folder / 'config.json', max_position_embeddings=512)
    edit_json(folder / 'tokenizer_config.json', chat_template=OWN)
    (folder / 'generation_config.json').write_text('{"do_sample": true, "temperature": 0.3}')


def made(folder: Path) -> Path:
    masters = {name: parameter.detach() for name, parameter in build('llama').named_parameters()}
    return MadeCheckpoint(masters=masters, dtype=torch.bfloat16).write(folder)


def written(out: Path) -> tuple[Any, ...]:
    """The chat template, the temperature and the context length in a folder."""
    generation = json.loads((out / 'generation_config.json').read_text())
    context = json.loads((out / 'config.json').read_text())['max_position_embeddings']
    return transformers.AutoTokenizer.from_pretrained(out).chat_template, generation.get('temperature'), context


LAYOUTS = {
    'accelerate': ('step_5/pytorch_model', ('step_5/pytorch_model', 'step_5', '')),
    'trainer': ('checkpoint-5/global_step5', ('checkpoint-5/global_step5', 'checkpoint-5', '')),
    'deepspeed': ('ckpt/global_step5', ('ckpt/global_step5', 'ckpt')),
    'mmengine': ('work/iter_5.pth', ('work/iter_5.pth', 'work')),
}


@pytest.mark.parametrize('layout', LAYOUTS)
def test_what_the_run_left_comes_before_the_base_as_far_as_the_layout_goes(base, tmp_path, layout, capsys, monkeypatch):
    """From wherever it is named. What lies higher is of another model."""
    inside, own = LAYOUTS[layout]
    of_base = written(base)
    for number, place in enumerate(('step_5', 'checkpoint-5', 'ckpt', 'work', '')):
        run = tmp_path / str(number) / 'run'
        checkpoint = made(run / inside)
        leave(run / place, base)
        is_own = place in own
        for at, (cwd, given) in enumerate([(Path('/'), checkpoint), (checkpoint, Path('.')), (run, Path(inside))]):
            monkeypatch.chdir(cwd)
            out = convert(given, tmp_path / str(number) / f'out{at}', '--base', base)
            assert written(out) == ((OWN, 0.3, 512) if is_own else of_base), (place, cwd)
            said = capsys.readouterr().err
            for words in ('the tokenizer is that of', 'config.json is that of', 'generation_config.json is that of'):
                assert (f'{words} {run / place}' in said) == is_own, (words, said)
            of_none = f'config.json is that of {base}: no file of this run has what training set in it'
            assert (of_none in said) == (not is_own)


def test_where_training_put_another_head_on_the_base_the_rest_of_its_config_is_still_told(base, tmp_path, capsys):
    """The model is built twice, first as its config says."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=5)
    masters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    checkpoint = MadeCheckpoint(masters=masters, dtype=torch.bfloat16).write(tmp_path / 'ckpt' / 'global_step5')
    leave(tmp_path / 'ckpt', base)
    out = convert(checkpoint, tmp_path / 'out', '--base', base)
    config = json.loads((out / 'config.json').read_text())
    assert config['max_position_embeddings'] == 512 and config['architectures'] == [type(model).__name__]
    told = capsys.readouterr().err
    assert told.count(f'config.json is that of {tmp_path / "ckpt"}, not that of {base}; they differ in max_pos') == 1
    assert told.count(f'the checkpoint is of a {type(model).__name__}') == 1


def test_the_config_of_another_model_beside_is_not_taken(base, tmp_path, capsys):
    checkpoint = made(tmp_path / 'run' / 'global_step5')
    leave(tmp_path / 'run', base)
    edit_json(tmp_path / 'run' / 'config.json', num_hidden_layers=7)
    (tmp_path / 'run' / 'adapter_config.json').write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
    out = convert(checkpoint, tmp_path / 'out', '--base', base)
    assert written(out)[2] == written(base)[2]
    assert f'{tmp_path / "run"}/config.json is of another model than {base}' in capsys.readouterr().err


def test_a_merged_model_has_the_config_of_the_run_where_there_is_one(tmp_path, capsys):
    folder = base_of('llama', tmp_path / 'base')
    model = adapt(transformers.AutoModelForCausalLM.from_pretrained(folder))
    checkpoint = checkpoint_of(model, tmp_path / 'run')
    words = f'config.json is that of {folder}: no file of this run has what training set in it'
    convert(checkpoint, tmp_path / 'a', '--lora', 'adapter')
    assert words not in capsys.readouterr().err, 'an adapter has no config.json'
    convert(checkpoint, tmp_path / 'b', '--lora', 'merge')
    assert words in capsys.readouterr().err
    saved = tmp_path / 'run' / '20261122_101010' / 'hf_model'
    shutil.copytree(tmp_path / 'b', saved)
    edit_json(saved / 'config.json', max_position_embeddings=512)
    write_manifest(saved)
    out = convert(checkpoint, tmp_path / 'c', '--lora', 'merge')
    assert json.loads((out / 'config.json').read_text())['max_position_embeddings'] == 512
    assert words not in capsys.readouterr().err


def xtuners(base: Path, rest: str = '', llm: str = '', model: str = '') -> str:
    kind = 'transformers.AutoModelForCausalLM.from_pretrained'
    llm = f'llm=dict(type={kind!r}, pretrained_model_name_or_path={str(base)!r}, {llm})'
    return f"import os\nmodel = dict(type='xtuner.model.SupervisedFinetune', {model} {llm})\n{rest}\n"


def run_of(folder: Path, cfg: str | None) -> Path:
    folder.mkdir(exist_ok=True)
    state = {f'llm.{name}': tensor for name, tensor in build('llama').state_dict().items()}
    torch.save({'state_dict': state, **({} if cfg is None else {'meta': {'cfg': cfg}})}, folder / 'iter_5.pth')
    return folder / 'iter_5.pth'


TOKENIZER = "tokenizer = dict(type='transformers.AutoTokenizer.from_pretrained', pretrained_model_name_or_path="
LOST = {
    'moved': (f"{TOKENIZER}'/old/machine/tok')", "'/old/machine/tok' is no folder here and not in the cache"),
    'not cached': (f"{TOKENIZER}'me/tok')", "'me/tok' is no folder here and not in the cache"),
    'an expression': (f"{TOKENIZER}os.path.join('/x', 'tok'))", "it is \"os.path.join('/x', 'tok')\" (line 3),"),
    'a call': ('tokenizer = build_tokenizer()', "it is 'build_tokenizer()' (line 3), which is not run"),
    'another library': ("tokenizer = dict(type='sentencepiece.SentencePieceProcessor', model_file='/x/t.model')",
        'it is of the type sentencepiece.SentencePieceProcessor, not one of transformers'),
}  # fmt: skip


@pytest.mark.parametrize('case', LOST)
def test_a_tokenizer_of_the_config_that_cannot_be_read_is_told(base, tmp_path, capsys, case):
    recipe, reason = LOST[case]
    checkpoint = run_of(tmp_path, xtuners(base, recipe))
    out = convert(checkpoint, tmp_path / 'out')
    said = capsys.readouterr().err
    assert f'the tokenizer of the config in {checkpoint} is not written: {reason}' in said
    assert f'the tokenizer of {base} is written' in said and (out / 'tokenizer.json').is_file()


@pytest.mark.parametrize(
    ('option', 'tokens'),
    [("additional_special_tokens=['w5', 'w6']", {'w5', 'w6'}), ("mask_token='w9'", {'w9'}), ("pad_token='w7'", {'w7'})],
)
@pytest.mark.parametrize('folder', ['base', '/old/tok'])
def test_all_plain_options_of_the_tokenizer_are_applied(base, tmp_path, option, tokens, folder):
    folder = str(base) if folder == 'base' else folder
    out = convert(run_of(tmp_path, xtuners(base, f'{TOKENIZER}{folder!r}, {option})')), tmp_path / 'out')
    assert tokens <= set(transformers.AutoTokenizer.from_pretrained(out).all_special_tokens)


@pytest.mark.parametrize('has_tokenizer', [True, False])
def test_an_image_processor_alone_is_completed_from_the_base(base, tmp_path, capsys, has_tokenizer):
    """As Trainer leaves it where it was given that alone; the hook saves the same."""
    if not has_tokenizer:
        base = shutil.copytree(base, tmp_path / 'base', ignore=shutil.ignore_patterns('tokenizer*'))
    checkpoint = made(tmp_path / 'ckpt' / 'global_step5')
    transformers.ViTImageProcessor(size=dict(height=8, width=8)).save_pretrained(tmp_path / 'ckpt')
    shutil.copy(base / 'config.json', tmp_path / 'ckpt')
    images = transformers.AutoProcessor.from_pretrained(tmp_path / 'ckpt')  # of another class in transformers 4.57
    out = convert(checkpoint, tmp_path / 'out', '--base', base)
    told = f'no tokenizer was found in {base}, so OUT has none' in capsys.readouterr().err
    assert (told, (out / 'tokenizer.json').exists()) == (not has_tokenizer, has_tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, torch_dtype=torch.bfloat16)
    save_hf(model, tmp_path / 'hook', tokenizer=images)
    assert_same_files(out, tmp_path / 'hook', but='model.safetensors')


@pytest.mark.parametrize('has_tokenizer', [True, False])
def test_a_processor_beside_that_cannot_be_loaded_is_copied(base, tmp_path, capsys, has_tokenizer):
    checkpoint = made(tmp_path / 'ckpt' / 'global_step5')
    if has_tokenizer:
        leave(tmp_path / 'ckpt', base)
    settings = tmp_path / 'ckpt' / 'preprocessor_config.json'
    settings.write_text(json.dumps(dict(image_processor_type='Own', auto_map=dict(AutoImageProcessor='own.Own'))))
    (tmp_path / 'ckpt' / 'own.py').write_text('# the code')
    out = convert(checkpoint, tmp_path / 'out', '--base', base)
    assert f'{settings.parent}: its processor cannot be loaded here, so its files are copied' in capsys.readouterr().err
    assert (out / settings.name).read_bytes() == settings.read_bytes() and (out / 'own.py').exists()
    assert written(out)[0] == (OWN if has_tokenizer else written(base)[0])


@pytest.fixture
def base_with_code(base, tmp_path):
    """Its tokenizer has code of its own and, like those of ChatGLM and Qwen, an attribute ``tokenizer``."""
    folder = shutil.copytree(base, tmp_path / 'base')
    (folder / 'tokenization_own.py').write_text(
        'from transformers import PreTrainedTokenizerFast\n'
        'class OwnTokenizer(PreTrainedTokenizerFast):\n'
        '    def __init__(self, **options):\n'
        '        super().__init__(**options)\n'
        '        self.tokenizer = "of another library"\n'
    )
    code = {'AutoTokenizer': ['tokenization_own.OwnTokenizer'] * 2}
    edit_json(folder / 'tokenizer_config.json', tokenizer_class='OwnTokenizer', auto_map=code)
    return folder


def test_a_tokenizer_with_code_of_its_own_gets_the_chat_template_of_training(base_with_code, tmp_path, capsys):
    cfg = xtuners(base_with_code, "prompt_template = dict(INSTRUCTION='<ask>{input}<answer>')")
    checkpoint = run_of(tmp_path / 'run', cfg)
    out = convert(checkpoint, tmp_path / 'trusted', '--trust-remote-code')
    assert '<ask>' in transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True).chat_template
    capsys.readouterr()
    out = convert(checkpoint, tmp_path / 'out')  # its code does not run: it is copied, as by the hook
    told = capsys.readouterr().err
    assert f'the tokenizer of {base_with_code} is copied as it is: it has code of its own, which is not run' in told
    assert 'the chat template of training is not written' in told
    for name in ('tokenizer.json', 'tokenizer_config.json', 'tokenization_own.py'):
        assert (out / name).read_bytes() == (base_with_code / name).read_bytes()


def test_a_tokenizer_of_a_save_stops_at_the_words_of_training(base, tmp_path):
    """It has more tokens than the base's, which training added."""
    smaller = shutil.copytree(base, tmp_path / 'base')
    save_tokenizer(smaller, 120)
    cfg = xtuners(smaller, "prompt_template = dict(INSTRUCTION='{input}', STOP_WORDS=['w5'])")
    checkpoint = run_of(tmp_path / 'run', cfg)
    saved = tmp_path / 'run' / '20261122_101010' / 'hf_model'
    saved.mkdir(parents=True)
    shutil.copy(smaller / 'config.json', saved)
    save_tokenizer(saved, 125)
    write_manifest(saved)
    out = convert(checkpoint, tmp_path / 'out')
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    stops = json.loads((out / 'generation_config.json').read_text())['eos_token_id']
    assert len(tokenizer) == 125 and tokenizer.convert_tokens_to_ids('w5') in stops


def test_configs_that_differ_are_told(base, tmp_path, capsys):
    checkpoint = run_of(tmp_path, xtuners(base, model='max_position_embeddings=64,'))
    given = tmp_path / 'mine.cfg'
    given.write_text(xtuners(base, model='max_position_embeddings=256,'))
    convert(checkpoint, tmp_path / 'out', '--config', given)
    assert (
        f'{given} and the config in {checkpoint} differ in model.max_position_embeddings (256 and 64): the first'
        in capsys.readouterr().err
    )


STRAY = {
    'Python 2': b'print "hello"\n',
    'Latin-1': '# Gr\u00fc\u00dfe\n'.encode('latin-1'),
    'a base': b"_base_ = 'x.py'\n",
}


@pytest.mark.parametrize('text', STRAY)
def test_a_file_beside_that_is_no_config_stops_nothing(base, tmp_path, capsys, text):
    checkpoint = run_of(tmp_path, None)
    (tmp_path / 'train.py').write_bytes(STRAY[text])
    convert(checkpoint, tmp_path / 'a', '--base', base)
    assert f'not read: {tmp_path / "train.py"}: ' in capsys.readouterr().err
    line = refused(capsys, checkpoint, tmp_path / 'b')
    assert f'no config was found (not read: {tmp_path / "train.py"}: ' in line
    dumped = tmp_path / '2024' / 'vis_data' / 'config.py'
    dumped.parent.mkdir(parents=True)
    dumped.write_text(xtuners(base))
    os.utime(dumped, (1, 1))
    convert(checkpoint, tmp_path / 'c')
    assert 'not read' not in capsys.readouterr().err
    refused(capsys, checkpoint, tmp_path / 'd', '--config', tmp_path / 'train.py')


@pytest.mark.parametrize('suffix', ['.json', '.yaml'])
def test_configs_in_json_and_yaml(base, tmp_path, suffix):
    llm = {'type': 'transformers.AutoModelForCausalLM.from_pretrained', 'pretrained_model_name_or_path': str(base)}
    fields = {'model': {'type': 'xtuner.model.SupervisedFinetune', 'llm': llm}}
    file = tmp_path / f'cfg{suffix}'
    file.write_text(json.dumps(fields) if suffix == '.json' else yaml.safe_dump(fields))
    convert(run_of(tmp_path, None), tmp_path / 'out', '--config', file)


OPTIONS_OF_ROPE = {
    'max_position_embeddings=128': ('', {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 500000.0}),
    'max_position_embeddings=64': ('', {'rope_type': 'linear', 'factor': 1.0, 'rope_theta': 500000.0}),
    'x=1': (
        "rope_scaling=dict(type='linear', factor=4.0)", {'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 500000.0}),
    'x=2': ('rope_theta=7.0', {'rope_type': 'default', 'rope_theta': 7.0}),
}  # fmt: skip


def rope_in(folder: Path) -> dict[str, Any]:
    """What config.json says of RoPE, in the words of transformers 5."""
    config = json.loads((folder / 'config.json').read_text())
    if 'rope_parameters' in config:
        return {name: value for name, value in config['rope_parameters'].items() if name != 'type'}
    scaling = dict(config['rope_scaling'] or {'type': 'default'})
    return {'rope_type': scaling.pop('type'), 'rope_theta': config['rope_theta'], **scaling}


def loads_scaling_by_one() -> bool:
    """Whether the installed transformers loads a scaling that changes nothing, as since 4.45."""
    try:
        transformers.LlamaConfig(rope_scaling={'type': 'linear', 'factor': 1.0})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize('model', OPTIONS_OF_ROPE)
def test_options_of_rope_in_a_config_for_transformers_4(base, tmp_path, model):
    llm, expected = OPTIONS_OF_ROPE[model]
    older = shutil.copytree(base, tmp_path / 'older')
    edit_json(older / 'config.json', rope_parameters=None, rope_theta=500000.0)
    out = convert(run_of(tmp_path, xtuners(older, llm=llm, model=f'{model},')), tmp_path / 'out')
    if expected.get('factor') == 1 and not loads_scaling_by_one():
        expected = {'rope_type': 'default', 'rope_theta': 500000.0}
    assert rope_in(out) == expected


@pytest.mark.modern_only
@pytest.mark.skipif(not converts_weights(), reason='transformers 4 has no rope_parameters')
def test_where_kinds_of_layers_have_their_own_rope_the_context_length_is_told(tmp_path, capsys):
    base = tmp_path / 'gemma'
    model = build('gemma3_text')
    model.save_pretrained(base)
    state = {f'llm.{name}': tensor for name, tensor in model.state_dict().items()}
    config = xtuners(base, model='max_position_embeddings=4096000,')
    torch.save({'state_dict': state, 'meta': {'cfg': config}}, tmp_path / 'iter_5.pth')
    out = convert(tmp_path / 'iter_5.pth', tmp_path / 'out')
    told = 'model.max_position_embeddings is not applied, since Gemma3TextConfig has RoPE for each kind of layer'
    assert told in capsys.readouterr().err
    written_rope, of_base = (json.loads((at / 'config.json').read_text())['rope_parameters'] for at in (out, base))
    assert written_rope == of_base


def test_an_option_that_no_config_has_is_told(base, tmp_path, capsys):
    convert(run_of(tmp_path, xtuners(base, llm='attn_implementation="eager", no_such=3')), tmp_path / 'out')
    assert 'options of model.llm that LlamaConfig lacks: no_such' in capsys.readouterr().err


def test_where_the_visual_encoder_was_moved_the_remedy_is_not_base(base, tmp_path, capsys):
    """--base is that of the llm."""
    kind = 'transformers.CLIPVisionModel.from_pretrained'
    encoder = f"visual_encoder=dict(type={kind!r}, pretrained_model_name_or_path='/old/clip'),"
    said = refused(capsys, run_of(tmp_path, xtuners(base, model=encoder)), tmp_path / 'out')
    assert '/old/clip (model.visual_encoder.pretrained_model_name_or_path of' in said and '--base' not in said
    assert 'set model.visual_encoder.pretrained_model_name_or_path in it, and give it with --config' in said


def test_paths_of_the_shell(base, tmp_path, monkeypatch, capsys):
    """A quoted ~, an empty --base, and a relative one, which adapter_config.json would repeat."""
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.chdir(base.parent)
    checkpoint = run_of(tmp_path, None)
    out = tmp_path / 'out'
    assert main([str(checkpoint), '~/out', '--base', base.name]) == 0 and out.is_dir()
    assert f'model {base}; ' in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([str(checkpoint), str(out), '--base', ''])
    assert ended.value.code == 2 and 'expected a folder or a name on the Hub' in capsys.readouterr().err


def test_a_conversion_does_not_replace_what_another_wrote_meanwhile(base, tmp_path, monkeypatch, capsys):
    run = Conversion.run
    command = [str(made(tmp_path / 'ckpt' / 'global_step5')), str(tmp_path / 'out'), '--base', str(base)]

    def run_second(conversion: Conversion, *args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        convert(*command)
        return run(conversion, *args, **options)

    monkeypatch.setattr(Conversion, 'run', run_second)
    assert main([*command, '--dtype', 'float32']) == 2
    assert f'{tmp_path / "out"} exists: another process has written it' in capsys.readouterr().err
    assert dtype_in(tmp_path / 'out') == 'bfloat16'
    convert(*command, '--dtype', 'float32', '--overwrite')
    assert dtype_in(tmp_path / 'out') == 'float32'
