"""vLLM on a CPU: what it answers from our folders is what the model in training answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.request import Request, urlopen

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.checks.compare import assert_loads_clean, folder_tensors
from tests.helpers.checks.pages import code
from tests.helpers.models.adapted import adapt
from tests.helpers.models.model_folder import save_tokenizer
from tests.helpers.models.zoo import Models, build
from tests.helpers.ranks.launch import run_ranks
from tests.helpers.ranks.processes import free_port
from tests.helpers.runs.frontends import make_trainer
from xhf_hooks import save_hf

VOCAB, IMAGE_TOKEN, N_TOKENS = 256, 255, 12
TOWER = 'vision_tower.vision_model'
PROMPTS = [[1, 5, 9, 70, 33], [1, 100, 7, 8], [1, 44]]
#: vLLM's kernels for a CPU take heads of 32 and of some multiples of 16. Large weights, so that the tokens vary.
SIZES = {
    'vocab_size': VOCAB,
    'hidden_size': 64,
    'intermediate_size': 128,
    'num_attention_heads': 2,
    'num_key_value_heads': 1,
    'head_dim': 32,
    'initializer_range': 0.3,
}
EXPERTS = {'num_experts_per_tok': 2, 'moe_intermediate_size': 64}
# Gemma scales embeddings and normalizes what its layers add: with large embeddings it would repeat the last token
GEMMA = {**SIZES, 'initializer_range': 0.02, 'query_pre_attn_scalar': 32}
LLAVA = {
    'text_config': SIZES,
    'vision_config': {'hidden_size': 64, 'intermediate_size': 96, 'num_attention_heads': 2},
    'image_token_index': IMAGE_TOKEN,
    'image_seq_length': 4,
}
MODELS: Models = {
    'llama': ('LlamaForCausalLM', SIZES),
    'llama_tied': ('LlamaForCausalLM', {**SIZES, 'tie_word_embeddings': True}),
    'qwen3': ('Qwen3ForCausalLM', SIZES),
    'qwen3_tied': ('Qwen3ForCausalLM', {**SIZES, 'tie_word_embeddings': True}),
    'qwen3_moe': ('Qwen3MoeForCausalLM', {**SIZES, **EXPERTS, 'num_experts': 4}),
    'mixtral': ('MixtralForCausalLM', {**SIZES, 'num_local_experts': 4, 'sliding_window': None}),
    'gemma3': ('Gemma3ForCausalLM', GEMMA),
    'llava': ('LlavaForConditionalGeneration', LLAVA),
}
ADAPTED = ['adapter', 'merged']
RELOADED = ['llama', 'llama_tied']
VARIABLES = {'VLLM_CPU_KVCACHE_SPACE': '1', 'VLLM_ENABLE_V1_MULTIPROCESSING': '0', 'CUDA_VISIBLE_DEVICES': ''}


def tokens_of(model: Any, prompt: list[int], **inputs: Any) -> list[int]:
    """What transformers chooses, the likeliest token after the other."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(N_TOKENS):
            likeliest = model(input_ids=tokens, **inputs).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, likeliest], dim=1)
    return tokens[0, len(prompt) :].tolist()


def make_processor() -> Any:
    """A processor for images of 8 by 8, whose tokenizer has `<image>` as its last token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    words = ['<pad>', '<s>', '</s>', '<unk>', *(f'w{i}' for i in range(VOCAB - 5)), '<image>']
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token='<pad>', eos_token='</s>', additional_special_tokens=['<image>']
    )
    images = CLIPImageProcessor(size={'shortest_edge': 8}, crop_size={'height': 8, 'width': 8})
    strategy = dict(vision_feature_select_strategy='default', num_additional_image_tokens=1)
    return LlavaProcessor(images, fast, patch_size=4, **strategy)


def with_the_names_of_the_hub(model: Any, base: Path) -> Any:
    """The model, loaded from a base whose vision tower has the names that LLaVA has on the Hub.

    A model that is built in transformers 5 is saved under other ones, which neither vLLM nor transformers 4 knows; one
    that is loaded keeps those of its base.
    """
    model.save_pretrained(base)
    tensors = {name.replace('vision_tower.', f'{TOWER}.'): x for name, x in folder_tensors(base).items()}
    save_file(tensors, base / 'model.safetensors', metadata={'format': 'pt'})
    loaded = assert_loads_clean(base, type(model)).eval()
    for parameter in loaded.parameters():
        parameter.data *= 1.05  # as if trained
    return loaded


@pytest.fixture(scope='module')
def answers(tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """By name: the tokens that the models in memory choose, and those of vLLM, which reads the folders."""
    root = tmp_path_factory.mktemp('vllm')
    expected: dict[str, Any] = {}
    requests: dict[str, Any] = {}
    for name in MODELS:
        model = build(name, models=MODELS).eval()
        requests[name] = {'folder': str(root / name), 'prompts': PROMPTS}
        if name == 'llava':
            model = with_the_names_of_the_hub(model, root / 'base')
            expected[name] = save_with_processor(model, root / name, requests[name])
            continue
        expected[name] = [tokens_of(model, prompt) for prompt in PROMPTS]
        save_hf(model, root / name)
        save_tokenizer(root / name, VOCAB)
    adapted = adapt(build('llama', models=MODELS), r=8).eval()
    for name, lora in (('adapter', 'adapter'), ('merged', 'merge')):
        expected[name] = [tokens_of(adapted, prompt) for prompt in PROMPTS]
        save_hf(adapted, root / name, lora=lora)
    save_tokenizer(root / 'merged', VOCAB)
    requests['adapter'] = {'folder': str(root / 'llama'), 'adapter': str(root / 'adapter'), 'prompts': PROMPTS}
    requests['merged'] = {'folder': str(root / 'merged'), 'prompts': PROMPTS}
    for name in RELOADED:
        newer = build(name, seed=1, models=MODELS).eval()
        expected[f'{name}_reloaded'] = [tokens_of(newer, prompt) for prompt in PROMPTS]
        save_hf(newer, root / f'{name}_newer')
        requests[f'{name}_reloaded'] = {**requests[name], 'reloads': str(root / f'{name}_newer')}
    return expected, run_vllm(requests, root)


def save_with_processor(model: Any, folder: Path, request: dict[str, Any]) -> list[list[int]]:
    """Save the model, and an image into the request; returns the tokens that the model chooses after it."""
    from PIL import Image

    processor, image = make_processor(), folder.with_suffix('.png')
    save_hf(model, folder, tokenizer=processor)
    assert any(name.startswith(TOWER) for name in folder_tensors(folder))
    pixels = torch.randint(256, (8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.numpy()).save(image)
    request['image'], request['prompts'] = str(image), [[*prompt, IMAGE_TOKEN, 50] for prompt in PROMPTS]
    found = []
    for prompt in PROMPTS:
        text = ' '.join([*processor.tokenizer.convert_ids_to_tokens(prompt), '<image>', 'w46'])
        inputs = processor(images=Image.open(image), text=text, return_tensors='pt')
        tokens = inputs['input_ids'][0].tolist()
        assert tokens == [*prompt, *[IMAGE_TOKEN] * 4, 50]
        found.append(tokens_of(model, tokens, pixel_values=inputs['pixel_values']))
    return found


def run_vllm(requests: dict[str, Any], root: Path) -> dict[str, Any]:
    """What vLLM answers."""
    asked, answered = root / 'requests.json', root / 'answers.json'
    asked.write_text(json.dumps({'n_tokens': N_TOKENS, 'requests': requests}))
    program = Path(__file__).with_name('vllm_run.py')
    done = subprocess.run(
        [sys.executable, program, asked, answered], env=os.environ | VARIABLES, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(answered.read_text())


@pytest.mark.parametrize('name', [*MODELS, *ADAPTED])
def test_tokens_are_those_of_transformers(answers, name):
    expected, found = answers
    assert found[name] == expected[name]
    # Tokens that hardly depend on the weights would prove nothing
    assert len({token for row in expected[name] for token in row}) > 6


def test_adapter_changes_the_tokens(answers):
    expected, _ = answers
    assert expected['adapter'] != expected['llama']


def test_reload_weights_reads_a_head_of_its_own(answers):
    expected, found = answers
    assert found['llama_reloaded'] == expected['llama_reloaded'] != expected['llama']


def test_reload_weights_mixes_two_models_if_embeddings_are_tied(answers):
    """What docs/on-saved.md warns of. If this fails since the tokens are the newer model's, its warning goes."""
    expected, found = answers
    assert found['llama_tied_reloaded'] not in (expected['llama_tied'], expected['llama_tied_reloaded'])


def train(on_saved: list[str], root: Path) -> list[list[int]]:
    """Train four steps of a tied model, and save two times; returns the tokens that it then chooses."""
    save_tokenizer(root / 'tokenizer', VOCAB)
    options = dict(on_saved=on_saved, tokenizer=str(root / 'tokenizer'), exit_wait_secs=1200)
    model = build('llama_tied', models=MODELS)
    with patch.dict(os.environ, VARIABLES):
        make_trainer(root, options, model=model, save_strategy='steps', save_steps=2).train()
    return [tokens_of(model.eval(), prompt) for prompt in PROMPTS]


def test_a_server_is_restarted_with_each_save(tmp_path):
    """The recipe of docs/on-saved.md, during training: at the end the server answers as the trained model."""
    found: dict[str, Any] = {}
    exec(code('vllm.entrypoints', 'on-saved.md'), found)
    port = free_port()
    ours = f'--port {port} --dtype float32 --enforce-eager --max-model-len 64'
    on_saved = [text.replace('--port 8000', ours).replace(':8000', f':{port}') for text in found['on_saved']]
    results = tmp_path / 'hf_model_on_saved'
    try:
        (expected,) = run_ranks(train, 1, on_saved, tmp_path)
        answered = [ask(port, prompt) for prompt in PROMPTS]
    finally:
        os.kill(int((results / 'server.pid').read_text()), signal.SIGTERM)
    assert all((results / step / 'server.log').exists() for step in ('iter_2', 'iter_4'))
    assert answered == expected


def ask(port: int, prompt: list[int]) -> list[int]:
    """What a server of vLLM answers to a prompt of tokens."""
    request = dict(
        model='mine', prompt=prompt, max_tokens=N_TOKENS, temperature=0, ignore_eos=True, return_token_ids=True
    )
    headers = {'Content-Type': 'application/json'}
    url = f'http://127.0.0.1:{port}/v1/completions'
    with urlopen(Request(url, json.dumps(request).encode(), headers), timeout=60) as answer:
        return json.load(answer)['choices'][0]['token_ids']
