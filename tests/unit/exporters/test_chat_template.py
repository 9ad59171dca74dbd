"""The chat template gives XTuner's training text: where xtuner is installed, its own code is the judge of that."""

import copy
import importlib.util
import re

import pytest
from jinja2 import TemplateError
from mmengine.config import ConfigDict
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from xhf_hooks.errors import OptionError
from xhf_hooks.xtuner import chat_template

HAS_XTUNER = importlib.util.find_spec('xtuner') is not None

# As in xtuner 0.2.0
DEFAULT = dict(SYSTEM='<|System|>:{system}\n', INSTRUCTION='<|User|>:{input}\n<|Bot|>:', SEP='\n')
QWEN = dict(
    SYSTEM='<|im_start|>system\n{system}<|im_end|>\n',
    INSTRUCTION='<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n',
    SUFFIX='<|im_end|>',
    SUFFIX_AS_EOS=True,
    SEP='\n',
    STOP_WORDS=['<|im_end|>', '<|endoftext|>'],
)
#: Not XTuner's: everything that Jinja could take for its own, in the template.
HARD = dict(
    SYSTEM="'{system}' \\n {{{{ x }}}} {{% raw %}}\r\n",
    INSTRUCTION='{{# {round} "{input}" #}}\\',
    SUFFIX=" -}} '\n\n",
    SEP='\t%} \u2028',
)
TEMPLATES = {'default': DEFAULT, 'qwen_chat': QWEN, 'hard': HARD}
if HAS_XTUNER:
    from xtuner.dataset.map_fns import openai_map_fn, template_map_fn
    from xtuner.dataset.utils import encode_fn, get_bos_eos_token_ids
    from xtuner.utils import PROMPT_TEMPLATE

    TEMPLATES = {**PROMPT_TEMPLATE, 'hard': ConfigDict(HARD)}
LLAMA3_WORDS = r'[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'


def answer(text: str) -> dict:
    return dict(role='assistant', content=text, loss='True')  # XTuner before 0.2 reads this as text


def dialogue(*texts: str, system: str | None = None) -> list[dict]:
    turns = [dict(role='user', content=text) if i % 2 == 0 else answer(text) for i, text in enumerate(texts)]
    return turns if system is None else [dict(role='system', content=system), *turns]


AWKWARD = ' \n{{ 7 * 7 }} {% if x %} {# y #} {input} {0} \'"\\n \\ <|im_end|> 问 🙂\r\n'
#: In these no text begins or ends with a space: no token can cross a border.
ORDINARY = {
    'one turn': dialogue('Why?', 'Because.'),
    'one turn, system': dialogue('Why?', 'Because.', system='Be brief.'),
    'three turns': dialogue('Why?', 'Because.', 'Who says\nso?', 'I do.', 'Thanks', 'Bye!'),
    'three turns, system': dialogue('Why?', 'Because.', 'Who?', 'I do.', 'Thanks', 'Bye!', system='Be brief.'),
    'empty system': dialogue('Why?', 'Because.', system=''),
}
DIALOGUES = {
    **ORDINARY,
    'awkward': dialogue(AWKWARD, AWKWARD, AWKWARD, AWKWARD, system=AWKWARD),
    'nothing said': dialogue('', '', '', ''),
    'two users, two systems': dialogue(system='a') + dialogue('b', system='c') + dialogue('d', 'e'),
    'later system': dialogue('a', 'b') + dialogue('c', 'd', system='e'),
    'two answers': [*dialogue('a', 'b'), answer('c'), *dialogue('d', 'e')],
    'answer first': [answer('Hello'), *dialogue('a', 'b')],
}


class Characters:
    """Encodes each character as itself, so that ids can be read back; BOS is -1 and EOS -2."""

    bos_token_id, eos_token_id, bos_token, eos_token = -1, -2, '<s>', '</s>'

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def text(self, ids: list[int]) -> str:
        return ''.join({-1: '<s>', -2: '</s>'}.get(i) or chr(i) for i in ids)


def training_ids(messages: list[dict], template: dict, tokenizer) -> list[int]:
    """What the functions of xtuner give."""
    turns = template_map_fn(openai_map_fn({'messages': copy.deepcopy(messages)}), template)
    return encode_fn(turns, tokenizer, max_length=10**6)['input_ids']


def training_text(messages: list[dict], template: dict) -> str:
    return Characters().text(training_ids(messages, template, Characters()))


@pytest.fixture(scope='module')
def plain():
    """A byte-level BPE like Llama 3's, trained: merges could cross the borders of pieces. No chat template."""
    texts = [text for template in TEMPLATES.values() for text in template.values() if isinstance(text, str)]
    texts += [message['content'] for messages in DIALOGUES.values() for message in messages]
    bpe = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(LLAMA3_WORDS), 'isolated')
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    marks = {mark for text in texts for mark in re.findall('<[^ >]+>', text)}
    special = ['<s>', '</s>', '<|endoftext|>', *sorted(marks)]
    options = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, special_tokens=special, **options))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token='<s>', eos_token='</s>')


def for_run(tokenizer, template: dict):
    return chat_template.tokenizer_for_run(tokenizer, {'prompt_template': template})


def chatting(tokenizer, template: dict):
    return for_run(tokenizer, template)[0]


@pytest.mark.xtuner_only
@pytest.mark.parametrize('dialogue_name', DIALOGUES)
@pytest.mark.parametrize('name', TEMPLATES)
def test_text_and_ids_are_those_of_training(name, dialogue_name, plain):
    template, messages = TEMPLATES[name], DIALOGUES[dialogue_name]
    tokenizer = chatting(plain, template)
    if template.get('SYSTEM') is None and any(m['role'] == 'system' and m['content'] for m in messages):
        with pytest.raises((KeyError, AttributeError)):  # XTuner refuses, too
            training_text(messages, template)
        with pytest.raises(TemplateError, match='without system messages'):
            tokenizer.apply_chat_template(messages, tokenize=False)
        return
    assert tokenizer.apply_chat_template(messages, tokenize=False) == training_text(messages, template)
    answered = [*messages[:-1], answer('☞')]
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert prompt == training_text(answered, template).partition('☞')[0]
    if dialogue_name in ORDINARY:
        encoded = tokenizer.apply_chat_template(messages)  # with a mask since transformers 5
        ids = encoded if isinstance(encoded, list) else encoded['input_ids']
        assert ids == training_ids(messages, template, plain)


@pytest.mark.parametrize('message', [dict(role='tool', content='x'), dict(role='user', content=[{'text': 'x'}])])
def test_what_training_never_had_is_refused(message, plain):
    with pytest.raises(TemplateError, match=r'Roles are|must be text'):
        chatting(plain, DEFAULT).apply_chat_template([message], tokenize=False)


BOS = {'Any': '<s>', 'QWenTokenizer': '', 'Qwen2TokenizerFast': '', 'ChatGLMTokenizer': '[gMASK]sop'}


@pytest.mark.parametrize(('kind', 'expected'), BOS.items())
def test_bos_depends_on_the_tokenizer(kind, expected):
    tokenizer = type(kind, (Characters,), {})()
    assert chat_template.bos_eos_text(tokenizer) == (expected, '</s>')
    ids = {'': [], '<s>': [-1], '[gMASK]sop': [64790, 64792]}[expected]
    assert not HAS_XTUNER or get_bos_eos_token_ids(tokenizer) == (ids, [-2])


def takes_named_templates() -> bool:
    """Whether the installed tokenizers may have several templates."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = NAMED
    try:
        return tokenizer.apply_chat_template([answer('')], tokenize=False) == 'x'
    except TypeError:
        return False


NAMED = {'default': 'x', 'tool_use': 'y'}


@pytest.mark.parametrize(
    'existing', [None, "{{ raise_exception('Not I') }}", *[NAMED] * takes_named_templates(), 'the same']
)
def test_another_template_is_replaced_in_a_copy(existing, plain):
    tokenizer = copy.deepcopy(plain)
    if existing == 'the same':
        existing = chatting(plain, DEFAULT).chat_template + '{# mine #}'
    tokenizer.chat_template = existing
    found, _, messages = for_run(tokenizer, DEFAULT)
    assert tokenizer.chat_template == existing and (found is tokenizer) == (not messages) == ('mine' in str(existing))
    assert found.apply_chat_template(ORDINARY['one turn'], tokenize=False).startswith('<s><|User|>:Why?')
    assert not isinstance(existing, dict) or found.chat_template['tool_use'] == 'y'


def test_stop_words_are_ids_or_named(plain):
    expected = [plain.convert_tokens_to_ids(token) for token in ('</s>', '<|im_end|>', '<|endoftext|>')]
    assert for_run(plain, QWEN)[1] == expected
    assert for_run(plain, DEFAULT)[1] == expected[:1]
    assert for_run(plain, dict(INSTRUCTION='', SUFFIX='<|im_end|>', SUFFIX_AS_EOS=True))[1] == expected[:2]
    template = {**DEFAULT, 'STOP_WORDS': ['<eoa> never seen', '</s>']}
    assert for_run(plain, template)[1] == [plain.eos_token_id]
    assert "['<eoa> never seen'] are not single tokens" in for_run(plain, template)[2][0]


def run_config(*map_fns, kind: str = 'process_hf_dataset', **others) -> ConfigDict:
    parts = [dict(type=f'xtuner.dataset.{kind}', template_map_fn=map_fn) for map_fn in map_fns] or [dict(type=kind)]
    return ConfigDict(train_dataloader=dict(dataset=dict(type='ConcatDataset', datasets=parts)), **others)


def factory(template) -> dict:
    return dict(type='xtuner.dataset.map_fns.template_map_fn_factory', template=template)


CONFIGS = [
    (run_config(factory(DEFAULT)), DEFAULT),
    (run_config(factory(f'{__name__}.DEFAULT')), DEFAULT),
    (run_config(factory(DEFAULT), None, prompt_template=QWEN), DEFAULT),
    (run_config(factory(DEFAULT), factory(QWEN), prompt_template=QWEN), QWEN),
    (run_config(kind='load_from_disk', prompt_template=QWEN), QWEN),
    (ConfigDict(train_dataset=dict(template_map_fn=factory(QWEN))), QWEN),
    (run_config(kind='build_preference_dataset', prompt_template=QWEN), None),
    (ConfigDict(), None),
]


@pytest.mark.parametrize(('config', 'expected'), CONFIGS)
def test_template_of_config(config, expected):
    assert chat_template.template_of_config(config) == expected


WRONG = [
    (run_config(factory('lama2_chat')), 'llama2_chat' if HAS_XTUNER else 'xtuner installed'),
    (run_config(factory('no.such.module')), 'no.such.module'),
    (run_config(factory(DEFAULT), factory(QWEN)), 'training data, which has several'),
]


@pytest.mark.parametrize(('config', 'said'), WRONG)
def test_wrong_templates_are_refused(config, said):
    with pytest.raises(OptionError, match=said):
        chat_template.template_of_config(config)


@pytest.mark.parametrize(
    'template', [dict(SYSTEM='{system}'), dict(INSTRUCTION='{bot_name}{input}'), dict(INSTRUCTION='', STOP_WORDS='x')]
)
def test_templates_that_xtuner_cannot_use_are_refused(template, plain):
    with pytest.raises(OptionError, match='prompt_template'):
        for_run(plain, template)
