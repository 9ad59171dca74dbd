"""Builds models of XTuner V1 whose checkpoints have fused experts: V1 itself does it, where it is installed.

Only V1 knows which tensors of a folder it has fused. Its dense models have the names of transformers, and need no V1.
"""

from __future__ import annotations

import re
from pathlib import Path

from xhf_hooks.errors import BaseModelError, OptionError
from xhf_hooks.exporters.assets.base_files import find_base_folder
from xhf_hooks.exporters.on_meta import call_on_meta
from xhf_hooks.format.text import refused_as, some
from xhf_hooks.offline.model.meta_model import MetaModel
from xhf_hooks.offline.model.run_config import RunConfig

#: In V1's own checkpoints (``MoEBlock`` in xtuner ``v1/module/decoder_layer/moe_decoder_layer.py``).
_FUSED_EXPERTS = re.compile(r'(.+\.)?layers\.\d+\.experts\.fused_w\w+\.weight')


def build_xtuner_v1(meta_model: MetaModel, config: RunConfig, base: str | None, folder: Path | None) -> bool:
    """Build the model that V1 makes of a base's config; False if the checkpoint has no experts that V1 has fused.

    Args:
        meta_model: Gets the model.
        base: Folder or hub name of the base, given by the user.
        folder: The folder of the checkpoint's config.json, if base is None.

    Raises:
        BaseModelError: V1 is not installed here, or does not make a model of this config.
        OptionError: An architecture was given.
    """
    fused = [name for name in meta_model.stored if _FUSED_EXPERTS.fullmatch(name)]
    base = base or (str(folder) if folder else None)
    if not fused or base is None:
        return False
    if meta_model.architecture is not None:
        raise OptionError('architecture', 'no value, since XTuner V1 says what was trained', meta_model.architecture)
    meta_model.described_by = base
    found = find_base_folder(base)
    if getattr(meta_model.config_in(base, 'the model'), 'auto_map', None) and not meta_model.trust_remote_code:
        raise BaseModelError(
            f'{base} has custom code, which XTuner V1 runs to read its config.json: add --trust-remote-code if you '
            f'trust it, or remove auto_map from a copy of config.json'
        )
    remedy = 'install XTuner V1 here (docs/xtuner_v1.md), or convert where the run was trained'
    with refused_as(BaseModelError, f'only XTuner V1 can split the experts that it has fused: {some(fused)}', remedy):
        from xtuner.v1.model import get_model_config_from_hf
    with refused_as(BaseModelError, f'{base}: XTuner V1 cannot build the model of its config.json'):
        v1_config = get_model_config_from_hf(found)
        v1_config.compile_cfg = False  # V1 would replace functions of its own modules by compiled ones
        meta_model.module = call_on_meta(v1_config.build)
        meta_model.module.set_hf(found)
    meta_model.notes.append(
        f'names, dtypes and config.json are those that XTuner V1 makes of {base}/config.json: settings of the run, '
        f'such as hf_key_mapping and fp32_keys_pattern, are not applied'
    )
    return True
