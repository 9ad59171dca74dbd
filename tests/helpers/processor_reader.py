"""A program that reads processors with the installed transformers: token ids, pixels and a dialogue.

    python tests/helpers/processor_reader.py OUT FOLDER...

OUT is a file of torch with a dict for each folder.
"""

from __future__ import annotations

import sys
from typing import Any

TEXT = 'Hello <image> naïve café'
CHAT = [{'role': 'user', 'content': 'Why?'}]


def read(processor: Any) -> dict[str, Any]:
    import numpy as np

    image = np.arange(12 * 9 * 3, dtype=np.uint8).reshape(12, 9, 3)
    return {
        'ids': processor.tokenizer(TEXT).input_ids,
        'pixels': processor.image_processor(image, return_tensors='pt').pixel_values,
        'patch_size': processor.patch_size,
        'chat': processor.apply_chat_template(CHAT, tokenize=False),
    }


if __name__ == '__main__':
    import torch
    from transformers import AutoProcessor

    torch.save({folder: read(AutoProcessor.from_pretrained(folder)) for folder in sys.argv[2:]}, sys.argv[1])
