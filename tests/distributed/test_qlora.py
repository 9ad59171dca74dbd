"""QLoRA: an adapter trained on a base that bitsandbytes quantized to 4 bits, at ZeRO-2 on real ranks.

XTuner's stack cannot run it without a GPU: transformers 4.48 refuses bitsandbytes on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.ranks import run_ranks

N_STEPS = 3


def load_quantized(base: Path) -> Any:
    """As XTuner's QLoRA configs have it, in bf16."""
    import transformers

    nf4 = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type='nf4',
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(base, quantization_config=nf4, torch_dtype=torch.bfloat16)


def train_and_save(root: Path) -> tuple[set[str], set[str], str]:
    """Names that were read, and that were trained; why it is not merged. Runs on: all ranks."""
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from torch import nn

    from tests.helpers.engines import names_read, save_folder, zero_engine
    from xhf_hooks.errors import AgreedError

    model = nn.Module()  # in the shape of XTuner's SupervisedFinetune
    llm = prepare_model_for_kbit_training(load_quantized(root / 'base'), use_gradient_checkpointing=False)
    torch.manual_seed(1)
    model.llm = get_peft_model(llm, LoraConfig(r=3, target_modules=['q_proj', 'v_proj'], task_type='CAUSAL_LM'))
    engine = zero_engine(model, 2)
    tokens = torch.randint(131, (2, 12), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(N_STEPS):
        engine.backward(model.llm(input_ids=tokens, labels=tokens).loss)
        engine.step()
    plan, _ = save_folder(engine.module, root / 'hf_model')
    with pytest.raises(AgreedError) as caught:
        save_folder(engine.module, root / 'merged', lora='both')
    if dist.get_rank() == 0:
        model.llm.save_pretrained(root / 'expected')
    trained = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    return names_read(plan), trained, str(caught.value)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    from tests.helpers.zoo.llamas import VOCAB, llama

    root = tmp_path_factory.mktemp('qlora')
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4)
    llama(vocab_size=VOCAB, **sizes).save_pretrained(root / 'base')  # bitsandbytes quantizes in blocks of 64
    return root, run_ranks(train_and_save, 2, root)


def test_only_what_was_trained_is_read_and_nothing_is_merged(saved):
    root, ((read, trained, refusal), _) = saved
    assert read == trained
    tensors = folder_tensors(root / 'hf_model')
    assert len(tensors) == len(trained)
    assert all(tensor.any() for tensor in tensors.values()), 'B begins as zero: it was trained'
    assert 'is quantized (bitsandbytes), and such weights can neither be exported nor merged' in refusal
    assert "set lora to 'adapter'" in refusal and not (root / 'merged').exists()


def test_adapter_is_pefts_and_loads_onto_the_base(saved):
    """Quantized or not."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    root, _ = saved
    assert_same_folder_tensors(root / 'expected', root / 'hf_model')
    tokens = torch.tensor([[1, 5, 9]])
    quantized = load_quantized(root / 'base')
    assert quantized.model.layers[0].self_attn.q_proj.weight.dtype == torch.uint8
    for base in (AutoModelForCausalLM.from_pretrained(root / 'base'), quantized):
        before = base.eval()(input_ids=tokens).logits
        after = PeftModel.from_pretrained(base, root / 'hf_model').eval()(input_ids=tokens).logits
        assert not torch.equal(before, after)
