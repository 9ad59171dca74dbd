"""The demo's task: a small Llama that learns to write Python.

Its text is the code of one module of the Python standard library, which every machine has: so little that the model
knows it after a minute. As a script it makes the *base folder*, from which training starts:

    python tools/demo/task.py BASE_FOLDER

    BASE_FOLDER/
        tokenizer.json  tokenizer_config.json    BPE, trained on that text
        config.json                              a Llama of two million parameters
        tokens.npy                               the text as token ids, (tokens,) uint16

As a module (`custom_imports` in configs/demo_zero3.py) it gives MMEngine the model and the dataset.
"""

import argparse
import ast
import json
import os
import sysconfig
from inspect import signature
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaTokenizer,
    LlamaTokenizerFast,
)

UNK, BOS, EOS, PAD = '<unk>', '<s>', '</s>', '<pad>'
#: The module of the standard library of which the model learns the code.
MODULE = 'queue'
VOCAB_SIZE = 1024
HIDDEN_SIZE = 256
MAX_LENGTH = 512


def read_code() -> str:
    """Return the module's code, without comments and docstrings."""
    tree = ast.parse(Path(sysconfig.get_path('stdlib'), f'{MODULE}.py').read_text(encoding='utf-8'))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree) + '\n'


def train_tokenizer(texts: list[str]) -> LlamaTokenizer:
    """Train a tokenizer for any text on `texts`: BPE with byte fallback, like Llama 2's.

    All versions of transformers have its class, and llama.cpp converts it. Versions before 5 lack the generic class,
    and llama.cpp identifies byte-level tokenizers only by the ids of a test text.
    """
    bpe = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token=UNK))
    bpe.normalizer = normalizers.Replace(' ', '▁')
    # Only in training, so that no token spans two words. Indentation is one token
    bpe.pre_tokenizer = pre_tokenizers.Split(Regex(r'▁*\w+|▁*[^\w▁\n]+|▁+|\n+'), 'isolated')
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[UNK, BOS, EOS, PAD, *(f'<0x{byte:02X}>' for byte in range(256))],
            limit_alphabet=100,  # the rest is encoded as bytes
            show_progress=False,
        ),
    )
    options = dict(
        pad_token=PAD,
        model_max_length=MAX_LENGTH,
        add_bos_token=True,  # the class's default differs between versions of transformers
    )
    trained = json.loads(bpe.to_str())['model']
    # Before tokenizers 0.20 a merge is one text, with a space between its two tokens
    pairs = [pair.split(' ') if isinstance(pair, str) else pair for pair in trained['merges']]
    vocab, merges = trained['vocab'], [tuple(pair) for pair in pairs]
    if 'vocab' in signature(LlamaTokenizer.__init__).parameters:
        return LlamaTokenizer(vocab=vocab, merges=merges, **options)
    # transformers 4 takes the whole tokenizer: what 5 makes of the vocabulary
    whole = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    whole.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme='first', split=False)
    whole.decoder = decoders.Sequence(
        [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
    )
    return LlamaTokenizerFast(tokenizer_object=whole, **options)


def small_llama(tokenizer: LlamaTokenizer) -> LlamaConfig:
    """Return the config of a Llama that two CPU cores can train in minutes."""
    special_tokens = dict(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        # transformers' 0.02 suits models of the usual width; this small one learns much faster with this value
        initializer_range=HIDDEN_SIZE**-0.5,
        architectures=['LlamaForCausalLM'],
        **special_tokens,
    )


def make_base_folder(folder: Path) -> None:
    """Write the base folder, config.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    text = read_code()
    tokenizer = train_tokenizer([text])
    tokenizer.save_pretrained(folder)
    tokens = np.asarray(tokenizer.backend_tokenizer.encode(text + EOS).ids, dtype=np.uint16)
    np.save(folder / 'tokens.npy', tokens)
    small_llama(tokenizer).save_pretrained(folder)
    print(f'{folder}: a tokenizer, a config, and {len(tokens):,} tokens of the code of {MODULE}.py')


@DATASETS.register_module()
class TokenBlocks(Dataset):
    """Blocks of the base folder's tokens, one from each position.

    Blocks that overlap let the model learn what follows a token, instead of what stands where in a block.

    Args:
        base_folder: A folder that `make_base_folder` wrote.
        block_length: Tokens in a block.
    """

    #: MMEngine warns of a dataset without
    metainfo: ClassVar[dict[str, str]] = {}

    def __init__(self, base_folder: str, block_length: int) -> None:
        self.tokens = np.load(os.path.join(base_folder, 'tokens.npy'), mmap_mode='r')
        self.bos_token_id = AutoConfig.from_pretrained(base_folder).bos_token_id
        self.block_length = block_length

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.tokens) - self.block_length + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one block as `input_ids` and `labels`, both (block_length,) int64."""
        ids = torch.from_numpy(self.tokens[index : index + self.block_length].astype(np.int64))
        ids[0] = self.bos_token_id  # as the tokenizer begins a prompt
        # transformers shifts the labels by one position itself
        return dict(input_ids=ids, labels=ids)


@MODELS.register_module()
class DemoCausalLM(BaseModel):
    """A transformers causal LM, with random weights, under MMEngine's training interface.

    Args:
        base_folder: A folder that `make_base_folder` wrote; its config.json defines the model.
    """

    def __init__(self, base_folder: str) -> None:
        super().__init__()
        self.llm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base_folder))

    def init_weights(self) -> None:
        """Leave the weights as transformers initialised them."""

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        mode: str = 'loss',
    ) -> dict[str, torch.Tensor]:
        """Return the loss of a batch.

        Args:
            input_ids: (batch, block_length) int64.
            labels: The same shape.
            mode: MMEngine's mode; only 'loss' is supported, since this model is only trained.

        Raises:
            ValueError: Another mode was requested.
        """
        if mode != 'loss':
            raise ValueError(f"DemoCausalLM only knows mode='loss', got mode={mode!r}")
        return dict(loss=self.llm(input_ids=input_ids, labels=labels, use_cache=False).loss)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='Make the base folder of the demo.')
    parser.add_argument('base_folder', type=Path, help='the folder to make')
    make_base_folder(parser.parse_args().base_folder)
