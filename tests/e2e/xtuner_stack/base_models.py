"""What a run of `xtuner train` starts from, made on the spot: tiny base models, their tokenizer, a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
# Odd sizes, so that two ranks cannot share a parameter without padding. The embeddings have just over the
# 100,000 elements up to which ZeRO-3, as XTuner configures it, keeps a parameter whole on every rank.
_SIZES = dict(
    hidden_size=335,
    intermediate_size=33,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=6,
    max_position_embeddings=128,
)
_VOCABULARY_SIZE = 301  # 256 bytes, 3 special tokens, and what the BPE learns from the dataset
_N_SAMPLES = 48


def make_base_model(folder: Path, family: str) -> None:
    """A folder that AutoModelForCausalLM and AutoTokenizer load, with float32 weights."""
    import torch
    import transformers

    tokenizer = _train_tokenizer()
    config_class, options = FAMILIES[family]
    config = getattr(transformers, config_class)(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **_SIZES | options,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_llava(root: Path) -> None:
    """What a LLaVA starts from (llm, clip), chats about images (chats.json), and the images."""
    from PIL import Image

    from tests.helpers.zoo.llava import save_bases

    save_bases(root)
    (root / 'images').mkdir()
    chats = []
    for i in range(4):
        Image.effect_noise((9 + i, 11), 60).convert('RGB').save(root / 'images' / f'{i}.png')
        turns = {'human': f'<image>\nwhat is this w{i}', 'gpt': f'this is a cat w{i}'}
        conversation = [{'from': who, 'value': text} for who, text in turns.items()]
        chats.append({'id': i, 'image': f'{i}.png', 'conversations': conversation})
    (root / 'chats.json').write_text(json.dumps(chats))


def make_dataset(file: Path) -> None:
    """A json file in the style of Alpaca: sums, with their answers."""
    file.write_text(json.dumps(_samples(), indent=1))


def make_preferences(file: Path) -> None:
    """A json file in the style of orpo-dpo-mix-40k: the same sums, with a wrong answer beside each right one."""
    pairs = []
    for sample in _samples()[:8]:
        question = {'role': 'user', 'content': f'{sample["instruction"]} {sample["input"]}'}
        answers = {'chosen': sample['output'], 'rejected': 'I do not know.'}
        pairs.append({kind: [question, {'role': 'assistant', 'content': text}] for kind, text in answers.items()})
    file.write_text(json.dumps(pairs, indent=1))


def _samples() -> list[dict[str, str]]:
    pairs = [(i * 37 % 100, i * 53 % 100) for i in range(_N_SAMPLES)]
    return [
        {
            'instruction': 'Add the two numbers.',
            'input': f'{a} and {b}',
            'output': f'The sum of {a} and {b} is {a + b}.',
        }
        for a, b in pairs
    ]


def _train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE, as Llama 3 and Qwen have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict(bos_token='<s>', eos_token='</s>', pad_token='<pad>')
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE,
        special_tokens=[*special.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for sample in _samples() for text in sample.values()), trainer)
    # Without token_type_ids, which these models do not take
    inputs = ['input_ids', 'attention_mask']
    chat = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, chat_template=chat, **special)
