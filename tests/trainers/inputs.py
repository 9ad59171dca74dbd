"""What every trainer gets."""

from __future__ import annotations

from typing import Any

from tests.helpers.runs.zero_config import zero_config


def texts() -> list[dict[str, str]]:
    """Lines of the words that tests.helpers.models.model_folder.save_tokenizer knows."""
    return [{'text': ' '.join(f'w{(7 * line + word) % 40}' for word in range(20))} for line in range(32)]


def pairs() -> list[dict[str, str]]:
    """Prompts, each with a better and a worse answer."""
    found = []
    for text in texts():
        words = text['text'].split()
        found.append({'prompt': ' '.join(words[:8]), 'chosen': ' '.join(words[8:14]), 'rejected': ' '.join(words[14:])})
    return found


def chats() -> list[dict[str, Any]]:
    """The same lines as answers."""
    roles = ('user', 'w1 w2 w3'), ('assistant', '')
    return [{'messages': [{'role': role, 'content': said or text['text']} for role, said in roles]} for text in texts()]


def zero3() -> dict[str, Any]:
    """Parameters in slices; the trainer may gather them for its own save."""
    config = zero_config(3)
    config['zero_optimization']['stage3_gather_16bit_weights_on_model_save'] = True
    return config
