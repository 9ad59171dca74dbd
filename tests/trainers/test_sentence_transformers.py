"""sentence-transformers: it loads what is saved of its models, and computes the same embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer, models
from transformers import BertConfig, BertModel

from tests.helpers.models.model_folder import save_tokenizer
from tests.helpers.ranks.launch import run_ranks
from tests.helpers.runs.zero_config import zero_config
from xhf_hooks import save_hf

SIZES = dict(vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
TEXTS = ['w11 w12 w13', 'w14']


@pytest.fixture
def base(tmp_path) -> Path:
    BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path / 'base')
    save_tokenizer(tmp_path / 'base', SIZES['vocab_size'])
    return tmp_path / 'base'


def sentences(base: Path, lora: str | None) -> SentenceTransformer:
    """As BGE, with a projection of its own; none of it is the default of SentenceTransformer(folder)."""
    torch.manual_seed(0)
    pooling, projection = models.Pooling(32, pooling_mode='cls'), models.Dense(32, 16)
    model = SentenceTransformer(modules=[models.Transformer(str(base)), pooling, projection, models.Normalize()])
    if lora is not None:
        ((name, inner),) = model[0].named_children()
        adapter = LoraConfig(r=2, target_modules=['query'], init_lora_weights=False)
        setattr(model[0], name, get_peft_model(inner, adapter))
    return model


@pytest.mark.parametrize('lora', [None, 'adapter', 'merge', 'both'])
def test_same_embeddings(lora, base, tmp_path, caplog):
    model = sentences(base, lora)
    options: dict[str, Any] = {} if lora is None else {'lora': lora}
    save_hf(model, tmp_path / 'found', **options)
    assert [record.getMessage() for record in caplog.records if record.levelname == 'WARNING'] == []
    loaded = SentenceTransformer(str(tmp_path / 'found'))
    assert [type(module) for module in loaded] == [type(module) for module in model]
    wanted, found = model.encode(TEXTS), loaded.encode(TEXTS)
    assert found.shape == (2, 16)
    if lora in (None, 'adapter'):
        assert np.array_equal(found, wanted)
    assert np.abs(found - wanted).max() < 1e-6  # merging rounds


def train_partitioned(base: Path, folder: Path) -> tuple[list[str], dict[str, np.ndarray]]:
    """One step at ZeRO-3, and a save; returns the types of the modules, and the weights that DeepSpeed gathers."""
    model = sentences(base, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero_config(3))
    engine.backward(engine(model.preprocess(TEXTS))['sentence_embedding'].float().square().sum(dim=0).max())
    engine.step()
    save_hf(engine, folder)
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        weights = {name: parameter.detach().float().numpy().copy() for name, parameter in model.named_parameters()}
    return [type(module).__name__ for module in model], weights


def test_a_projection_trained_at_zero3_is_saved(base, tmp_path):
    (modules, trained), _ = run_ranks(train_partitioned, 2, base, tmp_path / 'found')
    loaded = SentenceTransformer(str(tmp_path / 'found'))
    assert [type(module).__name__ for module in loaded] == modules
    found = {name: parameter.detach().float().numpy() for name, parameter in loaded.named_parameters()}
    assert found.keys() == trained.keys() and any('linear' in name for name in found), found.keys()
    for name, value in trained.items():
        assert np.array_equal(found[name], value), name
