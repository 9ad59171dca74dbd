"""The files of a model folder that loaders read: their names, and which they are at all.

One that is added or changed may change what is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from xhf_hooks.format.index import MANIFEST_NAME, WEIGHTS_SUFFIX

CONFIG = 'config.json'
ADAPTER_CONFIG = 'adapter_config.json'
#: Files that show that a folder holds a model.
CONFIGS = (CONFIG, ADAPTER_CONFIG)
GENERATION_CONFIG = 'generation_config.json'
#: Files of vocabularies, besides those that a tokenizer's class names. transformers 5 often reads only tokenizer.json.
VOCABULARY_FILES = (
    'tokenizer.model',
    'vocab.json',
    'merges.txt',
    'vocab.txt',
    'spiece.model',
    'sentencepiece.bpe.model',
    'tekken.json',
)
TOKENIZER_CONFIG = 'tokenizer_config.json'
TOKENIZER_JSON = 'tokenizer.json'
CHAT_TEMPLATE = 'chat_template.jinja'
#: Files that transformers writes. A folder with none of them, but a vocabulary, may be for another library.
TRANSFORMERS_TOKENIZER_FILES = (TOKENIZER_CONFIG, TOKENIZER_JSON)
#: Files of a tokenizer. A folder has one if it has one of these.
TOKENIZER_FILES = (*TRANSFORMERS_TOKENIZER_FILES, *VOCABULARY_FILES)
#: Files of a processor that are not its tokenizer's. transformers 5 saves them as one, which 4.48 cannot read.
PROCESSOR_FILES = ('processor_config.json', 'preprocessor_config.json', 'video_preprocessor_config.json')
#: The chat template of a processor, which transformers 5 no longer writes.
PROCESSOR_TEMPLATE = 'chat_template.json'
#: More files of a tokenizer, which make no tokenizer without the files above.
MORE_TOKENIZER_FILES = ('added_tokens.json', 'special_tokens_map.json', CHAT_TEMPLATE)
#: How the names of files with weights end, and of their indexes.
WEIGHT_SUFFIXES = (WEIGHTS_SUFFIX, '.bin', '.pt', '.pth', '.h5', '.msgpack', '.gguf', '.index.json')
_TEXT = re.compile(r'.+\.(json|model|jinja|txt|bpe|tiktoken|py)')
#: What Trainer and its examples leave, results of evaluations, files for pip.
_NOT_READ = re.compile(r'trainer_state\.json|.*results\.json|requirements.*\.txt')
#: A folder of which transformers reads every file (``CHAT_TEMPLATE_DIR`` in ``utils/hub.py``).
_TEMPLATES = 'additional_chat_templates'


def is_read_by_loaders(name: str, parts: Collection[str] = ()) -> bool:
    """Whether transformers, peft or a server may read the file.

    Args:
        name: Its path in the folder.
        parts: The folders below that belong to the model. What is in another one, such as a checkpoint of a trainer, is
            not read.
    """
    place = name.rpartition('/')[0]
    if place and place not in (*parts, _TEMPLATES):
        return False
    return name.endswith(WEIGHT_SUFFIXES) or is_loaded_text(name) or name == MANIFEST_NAME


def is_loaded_text(name: str) -> bool:
    """Whether loaders may read the file, and it has no weights: a config, a tokenizer, settings of an adapter, code.

    Args:
        name: Its path in the folder.
    """
    last = name.rpartition('/')[2]
    is_text = _TEXT.fullmatch(last) is not None and _NOT_READ.fullmatch(last) is None
    return is_text and not name.endswith(WEIGHT_SUFFIXES) and name != MANIFEST_NAME
