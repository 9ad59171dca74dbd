"""A program that saves base models with transformers 4, as on the hub: tokenizers, and one whole model.

python tests/helpers/models/older_bases.py OUT
"""

import json
import sys
from pathlib import Path

TEXT = ('The quick brown fox jumps over the lazy dog. Hello, world! 123\n', 'def f(x):\n    return x + 1\n') * 9
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"


def byte_level(special: list[str]):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special)
    )
    return made


def llama_3():
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    bos = '<|begin_of_text|>'
    made = byte_level([bos, '<|end_of_text|>', '<|eot_id|>'])
    made.post_processor = TemplateProcessing(
        single=f'{bos} $A', pair=f'{bos} $A {bos} $B', special_tokens=[(bos, made.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=bos, eos_token='<|eot_id|>')


def qwen2():
    """Made from vocabulary and merges: tokenizer.json has the class's own way to split text."""
    from tempfile import TemporaryDirectory

    from transformers import Qwen2TokenizerFast

    with TemporaryDirectory() as folder:
        byte_level([]).model.save(folder)
        return Qwen2TokenizerFast(
            f'{folder}/vocab.json',
            f'{folder}/merges.txt',
            eos_token='<|im_end|>',
            pad_token='<|endoftext|>',
            unk_token=None,
            additional_special_tokens=['<|im_start|>', '<|im_end|>'],
        )


def llama_2():
    """What transformers 4 converts tokenizer.model to: BPE with byte fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import LlamaTokenizerFast

    special = ['<unk>', '<s>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256))]
    trained = Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    trained.decoder = decoders.Sequence(
        [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
    )
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=330, special_tokens=special))
    fields = json.loads(trained.to_str())
    fields['added_tokens'] = fields['added_tokens'][:3]  # bytes are ordinary tokens
    return LlamaTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(fields)), legacy=False)


def save_llava(folder: Path) -> None:
    """A vision-language model, whose names are those of transformers 4."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    from tests.helpers.models.zoo import ODD_DECODER, VISION_TOWER

    torch.manual_seed(0)
    text = {**ODD_DECODER, 'vocab_size': 340}
    config = LlavaConfig(text_config=text, vision_config=VISION_TOWER, image_token_index=339, image_seq_length=4)
    LlavaForConditionalGeneration(config).save_pretrained(folder)


def save_processor(folder: Path) -> None:
    """With a tokenizer whose class transformers 5 saves under another name."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    tokenizer = llama_3()
    tokenizer.chat_template = TEMPLATE
    images = CLIPImageProcessor(size={'shortest_edge': 8}, crop_size={'height': 8, 'width': 8})
    LlavaProcessor(images, tokenizer, patch_size=4, chat_template=TEMPLATE).save_pretrained(folder)


if __name__ == '__main__':
    save_processor(Path(sys.argv[1]) / 'processor')
    save_llava(Path(sys.argv[1]) / 'llava_base')
    for make in (llama_3, qwen2, llama_2):
        tokenizer = make()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(Path(sys.argv[1]) / make.__name__, save_jinja_files=False)
    (Path(sys.argv[1]) / 'llama_2' / 'tokenizer.model').write_bytes(b'sentencepiece')  # only copied here
