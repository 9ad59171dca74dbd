"""What is trained outside of every model of transformers: Sa2VA's mask decoder and projections beside its chat model.

It goes into a folder of its own, which neither from_pretrained nor a server reads: they load what lies in the main
folder, and some, such as vLLM, each safetensors file there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from xhf_hooks.exporters.find_model import adapters_in, base_path, pretrained_in
from xhf_hooks.format.index import WEIGHTS_NAME
from xhf_hooks.model import names_by_identity
from xhf_hooks.planning.types import FileSet, TensorSpec

#: Folder of these modules in a save. Its only weight file has the names of the trained model's state dict.
OTHER_MODULES = 'other_modules'
#: One file, which ``load_file`` of safetensors reads as a state dict.
OTHER_FILES = FileSet(OTHER_MODULES, may_split=False)


def specs_of_other_modules(whole: nn.Module, specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors of each module outside of all models of transformers that has a trained parameter of its own.

    Buffers of such a module, such as the statistics of a normalization, change with its parameters, so a module is
    saved whole. Another model of transformers is left to a second hook with the option ``module``.

    Args:
        whole: The trained model.
        specs: The tensors that are not written otherwise.
    """
    inside = tuple(f'{path}.'.removeprefix('.') for path in (*pretrained_in(whole), *adapters_in(whole)))
    trained = {name for tensor, names in names_by_identity(whole) if tensor.requires_grad for name in names}
    outside = [spec for spec in specs if not any(name.startswith(inside) for name in (spec.name, *spec.aliases))]
    modules = {spec.name.rpartition('.')[0] for spec in outside if spec.name in trained}
    return {spec.name: spec for spec in outside if spec.name.rpartition('.')[0] in modules}


def write_config_of_other_modules(folder: Path, path: str) -> None:
    """Write the config.json beside their weights: where in the trained model the exported one was. Runs on: rank 0.

    Args:
        folder: The save.
        path: That of the exported model in the trained one, such as 'mllm.model'; perhaps in a PeftModel.
    """
    content = {
        'exported_model': path.removesuffix(base_path('.')),
        'tensor_names': 'as in the state dict of the trained model',
    }
    (folder / OTHER_MODULES / 'config.json').write_text(json.dumps(content, indent=2) + '\n')


def is_of_other_modules(file: str) -> bool:
    """Whether a file of a save, by its path there, has their weights."""
    return file == OTHER_FILES.path(WEIGHTS_NAME)
