"""Modules that save as those of sentence-transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


class Pooling(torch.nn.Module):
    def save(self, folder):
        Path(folder, 'config.json').write_text('{"pooling_mode": "cls"}')


#: Of modules with weights of their own.
WEIGHTS = 'model.safetensors'


class Projection(torch.nn.Linear):
    """As Dense of sentence-transformers."""

    def save(self, folder):
        Path(folder, 'config.json').write_text('{}')
        save_file({f'linear.{name}': tensor for name, tensor in self.state_dict().items()}, Path(folder, WEIGHTS))


class Halved(Projection):
    """What it saves is not what it has."""

    def save(self, folder):
        save_file({'weight': self.weight / 2}, Path(folder, WEIGHTS))


class First(torch.nn.Module):
    def __init__(self, model, processor):
        super().__init__()
        self.model, self.processor = model, processor

    def save(self, folder):
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        Path(folder, 'sentence_bert_config.json').write_text('{}')


class Sentences(torch.nn.Sequential):
    """Saves as SentenceTransformer of sentence-transformers 6.2 (its ``base/model.py``, ``save``)."""

    def save_pretrained(self, path, create_model_card=True):
        assert not create_model_card
        modules = []
        for name, module in self._modules.items():
            at = '' if name == '0' else f'{name}_{type(module).__name__}'
            Path(path, at).mkdir(exist_ok=True)
            module.save(str(Path(path, at)))
            modules.append({'idx': int(name), 'name': name, 'path': at})
        Path(path, 'modules.json').write_text(json.dumps(modules))
