"""sentence-transformers: it loads what is saved of its models, and computes the same embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer, models
from transformers import BertConfig, BertModel

from tests.helpers.models.model_folder import save_tokenizer
from xhf_hooks import save_hf

SIZES = dict(vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
TEXTS = ['w11 w12 w13', 'w14']


def sentences(base: Path, lora: str | None) -> SentenceTransformer:
    """As BGE, with a projection of its own; none of it is the default of SentenceTransformer(folder)."""
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).save_pretrained(base)
    save_tokenizer(base, SIZES['vocab_size'])
    pooling, projection = models.Pooling(32, pooling_mode='cls'), models.Dense(32, 16)
    model = SentenceTransformer(modules=[models.Transformer(str(base)), pooling, projection, models.Normalize()])
    if lora is not None:
        ((name, inner),) = model[0].named_children()
        adapter = LoraConfig(r=2, target_modules=['query'], init_lora_weights=False)
        setattr(model[0], name, get_peft_model(inner, adapter))
    return model


@pytest.mark.parametrize('lora', [None, 'adapter', 'merge', 'both'])
def test_same_embeddings(lora, tmp_path, caplog):
    model = sentences(tmp_path / 'base', lora)
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
