"""What a run of `xtuner train` starts from, made on the spot: tiny base models, their tokenizer, a dataset."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoTokenizer

from tests.helpers.models.model_folder import save_tokenizer
from tests.helpers.models.zoo import DECODER, NOISE_STD, ODD_DECODER, has_head_dim
from tests.helpers.models.zoo.internvl import make_internvl
from tests.helpers.models.zoo.llava import save_bases

#: XTuner since 0.1.20 has a copy of InternLM2's code.
INTERNLM2_CODE = Path(
    find_spec('xtuner').submodule_search_locations[0], 'tools', 'model_converters', 'modeling_internlm2_reward'
)
#: Family to its config class and what its config has that the others have not.
FAMILIES = {
    'llama': ('LlamaConfig', {}),
    'qwen2': ('Qwen2Config', {'tie_word_embeddings': True}),
    'mistral': ('MistralConfig', {}),
    # bitsandbytes packs what it quantized for a CPU by 32 rows and 64 columns
    'llama_by_64': (
        'LlamaConfig',
        dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    ),
}
# The embeddings have just over the 100,000 elements up to which ZeRO-3, as XTuner configures it, keeps a parameter
# whole on every rank. Odd sizes, so that two ranks cannot share a parameter without padding, where Llama's code allows
# them: before transformers 4.45 a head has hidden_size / num_attention_heads elements, which must be even.
_SIZES = dict(
    intermediate_size=33,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    max_position_embeddings=128,
) | (dict(hidden_size=333, head_dim=6, vocab_size=301) if has_head_dim() else dict(hidden_size=66, vocab_size=1541))


def make_base_model(folder: Path, family: str) -> None:
    """A folder that AutoModelForCausalLM and AutoTokenizer load, with float32 weights."""
    config_class, options = FAMILIES[family]
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = getattr(transformers, config_class)(**special, **_SIZES | options)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_chat_tokenizer(folder, config.vocab_size)


def save_chat_tokenizer(folder: Path, n_tokens: int) -> None:
    save_tokenizer(folder, n_tokens)
    inputs = ['input_ids', 'attention_mask']  # without token_type_ids, which these models do not take
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_input_names=inputs)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + eos_token }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def make_internlm2(folder: Path) -> None:
    """A folder as InternLM2's on the Hub, with its code: XTuner's copy of it, under the names of the Hub."""
    folder.mkdir()
    for file in INTERNLM2_CODE.glob('*_internlm2.py'):
        shutil.copy(file, folder)
    # What the code reads, and its config class has no default for
    config = dict(
        DECODER, attn_implementation='eager', bias=False, pretraining_tp=1, architectures=['InternLM2ForCausalLM']
    )
    config['auto_map'] = {
        'AutoConfig': 'configuration_internlm2.InternLM2Config',
        'AutoModel': 'modeling_internlm2.InternLM2ForCausalLM',
        'AutoModelForCausalLM': 'modeling_internlm2.InternLM2ForCausalLM',
    }
    (folder / 'config.json').write_text(json.dumps(config | {'model_type': 'internlm2'}))
    made = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(made, trust_remote_code=True)
    for parameter in model.parameters():
        parameter.data += NOISE_STD * torch.randn(parameter.shape)
    save_file(model.state_dict(), folder / 'model.safetensors', metadata={'format': 'pt'})
    save_chat_tokenizer(folder, DECODER['vocab_size'])


def make_llava(root: Path) -> None:
    """What a LLaVA starts from (llm, clip), chats about images (chats.json), and the images."""
    save_bases(root)
    (root / 'images').mkdir()
    chats = []
    for i in range(4):
        Image.effect_noise((9 + i, 11), 60).convert('RGB').save(root / 'images' / f'{i}.png')
        turns = {'human': f'<image>\nwhat is this w{i}', 'gpt': f'this is a cat w{i}'}
        conversation = [{'from': who, 'value': text} for who, text in turns.items()]
        chats.append({'id': i, 'image': f'{i}.png', 'conversations': conversation})
    (root / 'chats.json').write_text(json.dumps(chats))


def make_internvl_base(folder: Path) -> None:
    """InternVL's code with weights in bf16, and a tokenizer that has its three tokens for images."""
    make_internvl(folder, torch.bfloat16)
    tokens = ['<img>', '</img>', '<IMG_CONTEXT>']
    save_tokenizer(folder, ODD_DECODER['vocab_size'] - len(tokens))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({'additional_special_tokens': tokens})
    tokenizer.save_pretrained(folder)


def make_datasets(alpaca: Path, pairs: Path) -> None:
    """Questions and answers in the style of Alpaca; and with a wrong answer, too, in that of orpo-dpo-mix-40k."""
    samples = [(f'w{i * 37 % 100} w{i * 53 % 100}', f'w{i} w{i + 1}') for i in range(48)]
    questions = [dict(instruction='w200 w201', input=text, output=answer) for text, answer in samples]
    alpaca.write_text(json.dumps(questions))
    chosen_or_not = [
        {
            kind: [{'role': 'user', 'content': text}, {'role': 'assistant', 'content': said}]
            for kind, said in (('chosen', answer), ('rejected', 'w250 w251'))
        }
        for text, answer in samples[:8]
    ]
    pairs.write_text(json.dumps(chosen_or_not))
