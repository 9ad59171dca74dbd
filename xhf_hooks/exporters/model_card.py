"""``README.md``: the model card by which the Hub knows library, task and base of a model, and people how to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xhf_hooks.exporters.assets.base_files import LocatedBase
from xhf_hooks.format import strict_json
from xhf_hooks.format.loaded_files import PROCESSOR_FILES, TOKENIZER_FILES
from xhf_hooks.planning.types import Step

CARD_NAME = 'README.md'
#: Classes of transformers that load a model by its config.json, with the task by which the Hub lists its models and
#: the name of the table (``models/auto/modeling_auto.py``) of what they load. The first that loads a class counts:
#: some are in several tables. The Hub lists encoder-decoder models of texts under text-generation since July 2025.
_AUTO_CLASSES = (
    ('AutoModelForImageTextToText', 'image-text-to-text', 'MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES'),
    ('AutoModelForSpeechSeq2Seq', 'automatic-speech-recognition', 'MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES'),
    ('AutoModelForCTC', 'automatic-speech-recognition', 'MODEL_FOR_CTC_MAPPING_NAMES'),
    ('AutoModelForSeq2SeqLM', 'text-generation', 'MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES'),
    ('AutoModelForSequenceClassification', 'text-classification', 'MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES'),
    ('AutoModelForTokenClassification', 'token-classification', 'MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES'),
    ('AutoModelForQuestionAnswering', 'question-answering', 'MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES'),
    ('AutoModelForCausalLM', 'text-generation', 'MODEL_FOR_CAUSAL_LM_MAPPING_NAMES'),
    ('AutoModelForMaskedLM', 'fill-mask', 'MODEL_FOR_MASKED_LM_MAPPING_NAMES'),
    ('AutoModelForImageClassification', 'image-classification', 'MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES'),
    ('AutoModelForObjectDetection', 'object-detection', 'MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES'),
    ('AutoModelForSemanticSegmentation', 'image-segmentation', 'MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES'),
    ('AutoModelForAudioClassification', 'audio-classification', 'MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES'),
    ('AutoModel', 'feature-extraction', 'MODEL_MAPPING_NAMES'),
)
_FOLDER = "folder = '.'  # this folder, or its name on the Hub"
_SENTENCE_TRANSFORMERS = [
    'from sentence_transformers import SentenceTransformer',
    '',
    _FOLDER,
    'model = SentenceTransformer(folder)',
]


def write_model_card(folder: Path, base: LocatedBase, step: Step) -> None:
    """Write a model card into a folder that has none. Runs on: rank 0, when all but the weights is written.

    peft and sentence-transformers write their own. A folder that no library of the Hub loads as a whole gets none: it
    has several models, without a config.json of its own (LLaVA in parts), or its config.json names no class.

    Args:
        base: The model that training began with.
        step: The step of the save; iteration 0 if unknown.
    """
    if (folder / CARD_NAME).exists() or not (folder / 'config.json').is_file():
        return
    from huggingface_hub import ModelCardData

    config = strict_json.read(folder / 'config.json')
    # transformers 4.57 writes the class of Qwen2-VL and Qwen2.5-VL into the text model's part
    parts = (config, config.get('text_config') or {})
    kind = next((name for part in parts for name in part.get('architectures') or ()), '')
    if not kind:
        return
    auto_class, task = _find_auto_class(kind, config)
    if (folder / 'modules.json').is_file():
        library, task, command = 'sentence-transformers', 'sentence-similarity', _SENTENCE_TRANSFORMERS
    else:
        library, command = 'transformers', _lines_for_transformers(folder, auto_class or kind, 'auto_map' in config)
    base_id = _find_hub_name(base)
    data = ModelCardData(base_model=base_id, library_name=library, pipeline_tag=task, tags=['xhf_hooks'])
    # No path: it would reveal the machine's folders, and a conversion's base may be a folder that the run itself wrote
    sentence = 'Saved' if base_id is None else f'Trained from [{base_id}](https://huggingface.co/{base_id}) and saved'
    sentence += f' by xhf_hooks{_describe_step(step)}'
    lines = [
        '---',
        *data.to_yaml().strip().splitlines(),
        '---',
        '',
        f'# {kind}',
        '',
        f'{sentence}. `xhf_manifest.json` has the checksum of each file.',
        '',
        '```python',
        *command,
        '```',
    ]
    (folder / CARD_NAME).write_text('\n'.join([*lines, '']), encoding='utf-8')


def name_base_in_card(folder: Path, base: LocatedBase) -> None:
    """Name the base in a card that peft has written as in our own: by its name on the Hub, or not at all.

    peft writes what the model was loaded from, also a path, which the Hub refuses, and which reveals the machine's
    folders. Runs on: rank 0.
    """
    from huggingface_hub import ModelCard

    card, name = ModelCard.load(folder / CARD_NAME), _find_hub_name(base)
    written = card.data.to_dict().get('base_model')
    if not written or written == name:  # '': it was not loaded from anything
        return
    card.data.base_model = name
    tags = card.data.tags or []
    if name is None:
        card.data.tags = [tag for tag in tags if not tag.startswith('base_model:')]
    else:
        card.data.tags = [
            tag.removesuffix(str(written)) + name if tag.startswith('base_model:') else tag for tag in tags
        ]
    card.save(folder / CARD_NAME)


def _lines_for_transformers(folder: Path, model_class: str, has_code: bool) -> list[str]:
    trust = ', trust_remote_code=True' if has_code else ''
    classes = {'model': model_class}
    if any((folder / name).is_file() for name in PROCESSOR_FILES):
        classes['processor'] = 'AutoProcessor'
    elif any((folder / name).is_file() for name in TOKENIZER_FILES):
        classes['tokenizer'] = 'AutoTokenizer'
    return [
        f'from transformers import {", ".join(sorted(classes.values()))}',
        '',
        _FOLDER,
        *(f'{name} = {kind}.from_pretrained(folder{trust})' for name, kind in classes.items()),
    ]


def _find_auto_class(kind: str, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The class of transformers that loads a model of this class, and its task; None for what is not known.

    Args:
        kind: The name of the class.
        config: The content of config.json, which names the classes that load custom code.
    """
    from transformers.models.auto import modeling_auto

    tasks = {auto_class: task for auto_class, task, _ in _AUTO_CLASSES}
    for auto_class, code in (config.get('auto_map') or {}).items():
        if auto_class.startswith('AutoModel') and str(code).endswith(f'.{kind}'):
            return auto_class, tasks.get(auto_class)
    for auto_class, task, table in _AUTO_CLASSES:
        for names in getattr(modeling_auto, table, {}).values():
            if kind in ([names] if isinstance(names, str) else names):
                return auto_class, task
    return None, None


def _find_hub_name(base: LocatedBase) -> str | None:
    """The name of a base on the Hub, also of one that was loaded from its folder in a hub cache; None if unknown."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if base.folder is not None and base.folder.parent.name == 'snapshots':  # models--OWNER--NAME/snapshots/REVISION
        repository = base.folder.parents[1].name
        if repository.startswith('models--'):
            return repository.removeprefix('models--').replace('--', '/') if base.is_path else base.name
    if base.folder is not None or '/' not in base.name:  # a name without owner may as well be a folder that is gone
        return None
    try:
        validate_repo_id(base.name)
    except HFValidationError:
        return None
    return base.name


def _describe_step(step: Step) -> str:
    if step.iteration == 0:
        return ''
    iteration = f'iteration {step.iteration:,} of training'
    return f' after epoch {step.number:,}, {iteration}' if step.unit == 'epoch' else f' after {iteration}'
