"""A program that reads folders of models and of processors with the installed transformers.

    python tests/helpers/checks/reader.py OUT FOLDER...

OUT is a file of torch with a dict for each folder: of a model, token ids, logits and what was missing; of a processor,
token ids, pixels and a dialogue.
"""

import sys
from pathlib import Path
from typing import Any

TEXTS = ('Hello, world! 123', 'def f(x):\n    return x', 'naïve café 你好', '<pad> a <new1>b')
CHAT = [{'role': 'user', 'content': 'Why?'}]


def read_model(folder: Path) -> dict[str, Any]:
    import torch
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    kind = getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])
    model, report = kind.from_pretrained(folder, output_loading_info=True, torch_dtype='auto')
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.arange(3, 43)[None]).logits
    return {
        'version': transformers.__version__,
        'missing': {what: sorted(map(str, names)) for what, names in report.items() if names},
        'logits': logits,
        'tokenizer': read_tokenizer(tokenizer),
    }


def read_tokenizer(tokenizer: Any) -> dict[str, Any]:
    return {
        'ids': [tokenizer(text).input_ids for text in TEXTS],
        'special': [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS],
        'decoded': [tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) for text in TEXTS],
        'chat': tokenizer.apply_chat_template(CHAT, tokenize=False),
        'names': {name: getattr(tokenizer, name) for name in ('bos_token_id', 'eos_token_id', 'pad_token_id')},
    }


def read_processor(processor: Any) -> dict[str, Any]:
    import numpy as np

    image = np.arange(12 * 9 * 3, dtype=np.uint8).reshape(12, 9, 3)
    return {
        'ids': processor.tokenizer('Hello <image> naïve café').input_ids,
        'pixels': processor.image_processor(image, return_tensors='pt').pixel_values,
        'patch_size': processor.patch_size,
        'chat': processor.apply_chat_template(CHAT, tokenize=False),
    }


def read(folder: Path) -> dict[str, Any]:
    from transformers import AutoProcessor

    if (folder / 'config.json').exists():
        return read_model(folder)
    return read_processor(AutoProcessor.from_pretrained(folder))


if __name__ == '__main__':
    import torch

    torch.save({folder: read(Path(folder)) for folder in sys.argv[2:]}, sys.argv[1])
