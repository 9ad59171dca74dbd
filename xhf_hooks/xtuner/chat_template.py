"""Converts XTuner's prompt template to a chat template for the tokenizer.

XTuner trains with its own PROMPT_TEMPLATE, which the tokenizer does not have: without this conversion the exported
model would chat in a different format than it was trained on. The training format (``openai_map_fn``,
``template_map_fn`` and ``encode_fn`` in ``xtuner/dataset``):

- Each turn is ``[BOS] [SYSTEM] INSTRUCTION | output SUFFIX | [EOS] | SEP``. The last turn also ends with SEP.
- EOS follows the output unless ``SUFFIX_AS_EOS``. A turn begins with BOS when it is the first or an EOS came before.
- System and user messages before an answer form one turn: user texts are joined, and the last system text counts.
- Answers before the first system or user message are not trained on and not rendered.

XTuner drops messages after the last answer. Here they open the next turn, with or without ``add_generation_prompt``:
the instruction ends with the assistant's header. ``encode_fn`` encodes the pieces between bars separately; the full
text has the same ids if the tokenizer also splits there.
"""

from __future__ import annotations

import copy
import pkgutil
import re
import runpy
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xhf_hooks.errors import OptionError

#: Builders of training data that take no prompt template. They use the tokenizer's chat template
#: (``preference_dataset.py``) or a copy of the base model's official one (``internvl_dataset.py``).
_OWN_FORMAT = ('build_preference_dataset', 'InternVL_V1_5_Dataset')

_XTUNERS = ('xtuner.utils.PROMPT_TEMPLATE', 'xtuner.utils.templates.PROMPT_TEMPLATE')

#: Has whitespace at the ends: XTuner trains with it, but many templates strip it.
_PROBE_TURN = ({'role': 'user', 'content': ' Why?\n'}, {'role': 'assistant', 'content': ' Because.\n'})
_PROBE_SYSTEM = {'role': 'system', 'content': ' Be brief.\n'}

_JINJA = """
{%- macro opening(system, input, round) -%}
    {{- <bos> -}}
    {%- if system -%}{{- <system> -}}{%- endif -%}
    {{- <instruction> -}}
{%- endmacro -%}
{%- set turn = namespace(system='', input='', round=1, is_open=false) -%}
{%- for message in messages -%}
    {%- if message['content'] is not string -%}
        {{- raise_exception('The content of a message must be text') -}}
    {%- elif message['role'] == 'system' -%}
        {%- set turn.system = message['content'] -%}{%- set turn.is_open = true -%}
    {%- elif message['role'] == 'user' -%}
        {%- set turn.input = turn.input ~ message['content'] -%}{%- set turn.is_open = true -%}
    {%- elif message['role'] != 'assistant' -%}
        {{- raise_exception('Roles are system, user and assistant, found ' ~ message['role']) -}}
    {%- elif turn.is_open or turn.round > 1 -%}
        {{- opening(turn.system, turn.input, turn.round) ~ message['content'] ~ <end> -}}
        {%- set turn.system = '' -%}{%- set turn.input = '' -%}
        {%- set turn.round = turn.round + 1 -%}{%- set turn.is_open = false -%}
    {%- endif -%}
{%- endfor -%}
{%- if turn.is_open -%}
    {{- opening(turn.system, turn.input, turn.round) -}}
{%- endif -%}
"""


def _jinja_template(template: Mapping[str, Any], bos: str, eos: str) -> str:
    """The Jinja chat template that renders the text of XTuner's training.

    A template without SYSTEM refuses dialogues with a system message, as XTuner does.

    Args:
        template: As in ``xtuner.utils.PROMPT_TEMPLATE``: INSTRUCTION, and optionally SYSTEM, SUFFIX, SUFFIX_AS_EOS,
            SEP, STOP_WORDS.
    """
    if not isinstance(template, Mapping) or not isinstance(template.get('INSTRUCTION'), str):
        raise OptionError('prompt_template', 'a mapping with the text INSTRUCTION', template)
    suffix_is_eos = template.get('SUFFIX_AS_EOS', False)
    system = "raise_exception('This model was trained without system messages')"
    if template.get('SYSTEM') is not None:
        system = _expression(template, 'SYSTEM', ('system',))
    end = (template.get('SUFFIX') or '') + ('' if suffix_is_eos else eos) + (template.get('SEP') or '')
    filled = {
        'bos': f"({_quoted(bos)} if round == 1 else '')" if suffix_is_eos else _quoted(bos),
        'system': system,
        'instruction': _expression(template, 'INSTRUCTION', ('input', 'round')),
        'end': _quoted(end),
    }
    return re.sub(r'<(\w+)>', lambda place: filled[place[1]], _JINJA.strip())


def bos_eos_text(tokenizer: Any) -> tuple[str, str]:
    """The text of BOS and EOS in XTuner's training (``get_bos_eos_token_ids`` in ``dataset/utils.py``)."""
    kind = type(tokenizer).__name__
    eos = tokenizer.eos_token or ''
    if kind == 'Qwen2Tokenizer' and tokenizer.is_fast:  # its name since transformers 5
        kind = 'Qwen2TokenizerFast'
    if kind in ('QWenTokenizer', 'QWen2Tokenizer', 'Qwen2TokenizerFast'):
        return '', eos
    if kind == 'ChatGLMTokenizer':
        return '[gMASK]sop', eos  # its ids 64790 and 64792
    return tokenizer.bos_token or '', eos


def tokenizer_for_run(
    tokenizer: Any | None, cfg: Mapping[str, Any], *, may_import: bool = True
) -> tuple[Any | None, Sequence[int], Sequence[str]] | None:
    """The tokenizer to write for a run with this config, the EOS token ids of answers, and log messages.

    It is the tokenizer itself if its chat template renders the text of training, else a copy with one that does. The
    ids are of its EOS, STOP_WORDS, and SUFFIX if that replaces EOS; those must be single tokens. None: there is no
    tokenizer, or no template in the config. Runs on: rank 0.

    Args:
        may_import: Whether to import a template that the config names, other than XTuner's.

    Raises:
        OptionError: The template does not exist, is ambiguous, or XTuner could not train with it.
    """
    template = template_of_config(cfg, may_import=may_import)
    if template is None or tokenizer is None:
        return None
    if not hasattr(tokenizer, 'eos_token_id'):  # a processor, or files that are copied
        return tokenizer, (), (f'{type(tokenizer).__name__}: the chat template of training is not written',)
    bos, eos = bos_eos_text(tokenizer)
    wanted = _jinja_template(template, bos, eos)
    stop_ids = {word: _token_id(tokenizer, word) for word in _stop_words(template)}
    ids = [found for found in (tokenizer.eos_token_id, *stop_ids.values()) if found is not None]
    messages = []
    if skipped := [word for word, found in stop_ids.items() if found is None]:
        messages.append(f'stop words {skipped} are not single tokens: not in eos_token_id of generation_config.json')
    if not _renders_as(tokenizer, wanted, has_system=template.get('SYSTEM') is not None):
        tokenizer = copy.deepcopy(tokenizer)
        several = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else None
        tokenizer.chat_template = wanted if several is None else {**several, 'default': wanted}
        messages.append("the exported tokenizer gets the chat template of training, which the base's does not render")
    return tokenizer, list(dict.fromkeys(ids)), messages


def template_of_config(cfg: Mapping[str, Any], *, may_import: bool = True) -> Mapping[str, Any] | None:
    """The prompt template in a run's config.

    The template is that of the training data (``template_map_fn``) or, for prepared data, ``prompt_template``. None for
    raw text and for data that does not use a prompt template, such as preference pairs.

    Raises:
        OptionError: The template does not exist or is ambiguous.
    """
    dataset, dataloader = cfg.get('train_dataset'), cfg.get('train_dataloader')
    if isinstance(dataloader, Mapping) and dataloader.get('dataset') is not None:
        dataset = dataloader.get('dataset')
    used, no_template = [], False
    for part in _mappings(dataset):
        no_template |= _type_name(part) in _OWN_FORMAT
        if 'template_map_fn' in part:
            map_fn = part.get('template_map_fn')
            no_template |= map_fn is None
            if isinstance(map_fn, Mapping) and map_fn.get('template') is not None:
                used.append(_resolve(map_fn.get('template'), may_import))
    if used and all(template == used[0] for template in used):
        return used[0]
    named = cfg.get('prompt_template')
    if not used and (no_template or named is None):
        return None
    if named is not None and (not used or _resolve(named, may_import) in used):
        return _resolve(named, may_import)  # the template of XTuner's EvaluateChatHook
    raise OptionError('prompt_template', 'one of those of the training data, which has several', named)


def _expression(template: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
    """Convert a ``str.format`` string to a Jinja expression."""
    parts = []
    try:
        for literal, field, spec, conversion in string.Formatter().parse(template[key]):
            if literal:
                parts.append(_quoted(literal))
            if field is not None:
                if field not in known or spec or conversion:
                    raise ValueError(f'placeholder {field!r}')
                parts.append(field)
    except (ValueError, TypeError) as error:
        expected = f'a text whose placeholders are {["{" + name + "}" for name in known]}'
        raise OptionError(f'prompt_template.{key}', f'{expected} ({error})', template[key]) from None
    return ' ~ '.join(parts) or "''"


def _quoted(text: str) -> str:
    """A Jinja string literal. Line endings are escaped, since Jinja normalises them."""
    for found, escaped in (('\\', '\\\\'), ("'", "\\'"), ('\n', '\\n'), ('\r', '\\r')):
        text = text.replace(found, escaped)
    return f"'{text}'"


def _stop_words(template: Mapping[str, Any]) -> list[str]:
    words = template.get('STOP_WORDS', [])
    if isinstance(words, str) or not all(isinstance(word, str) and word for word in words):
        raise OptionError('prompt_template.STOP_WORDS', 'a list of texts', words)
    suffix = template.get('SUFFIX') if template.get('SUFFIX_AS_EOS', False) else None
    return [*words, *([suffix] if suffix else [])]


def _token_id(tokenizer: Any, word: str) -> int | None:
    token_id = tokenizer.convert_tokens_to_ids(word)
    if token_id is not None and token_id != tokenizer.unk_token_id:
        return token_id
    ids = tokenizer.encode(word, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None


def _renders_as(tokenizer: Any, wanted: str, *, has_system: bool) -> bool:
    """Whether the tokenizer's chat template gives the text of training, on sample dialogues."""
    if getattr(tokenizer, 'chat_template', None) is None:
        return False
    dialogues = [[*_PROBE_TURN], [*_PROBE_TURN] * 3, [_PROBE_TURN[0]], [*_PROBE_TURN, _PROBE_TURN[0]]]
    if has_system:
        dialogues += [[_PROBE_SYSTEM, *dialogue] for dialogue in dialogues]
    for dialogue in dialogues:
        options = dict(tokenize=False, add_generation_prompt=dialogue[-1]['role'] == 'user')
        trained = tokenizer.apply_chat_template(dialogue, chat_template=wanted, **options)
        try:
            if tokenizer.apply_chat_template(dialogue, **options) != trained:
                return False
        except Exception:  # a template may raise anything
            return False
    return True


def _mappings(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        yield node
        for key in node:
            yield from _mappings(_value(node, key))
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from _mappings(item)


def _value(mapping: Mapping[str, Any], key: str) -> Any:
    """A value of the config. MMEngine's lazy configs import it on access; what is not installed holds no template."""
    with suppress(ImportError, AttributeError):
        return mapping.get(key)
    return None


def _type_name(config: Mapping[str, Any]) -> str:
    kind = _value(config, 'type')
    return kind.rsplit('.', 1)[-1] if isinstance(kind, str) else getattr(kind, '__name__', '')


def _resolve(value: Any, may_import: bool) -> Mapping[str, Any]:
    """A template, given itself or its name."""
    if isinstance(value, Mapping):
        return value
    owner, _, name = str(value).rpartition('.')
    expected = 'a mapping with INSTRUCTION'
    if owner in ('', 'PROMPT_TEMPLATE', *_XTUNERS):
        templates = _xtuners_templates()
        if name in templates:
            return templates[name]
        expected = f'one of {sorted(templates)}, with xtuner installed'
    elif may_import:
        try:
            return pkgutil.resolve_name(str(value))
        except (ImportError, AttributeError, ValueError) as error:
            expected = f'a mapping, or something that can be imported ({error})'
    raise OptionError('prompt_template', expected, value)


def _xtuners_templates() -> Mapping[str, Any]:
    """XTuner's PROMPT_TEMPLATE, without the rest of XTuner, whose import takes many seconds."""
    found = find_spec('xtuner')
    places = (found.submodule_search_locations or ()) if found is not None else ()
    files = [file for place in places if (file := Path(place, 'utils', 'templates.py')).is_file()]
    return runpy.run_path(str(files[0]))['PROMPT_TEMPLATE'] if files else {}
