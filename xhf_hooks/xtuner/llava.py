"""Exports XTuner's ``LLaVAModel``: ``llm``, ``visual_encoder`` and ``projector``.

In XTuner's layout, or as transformers' ``LlavaForConditionalGeneration`` with adapters merged.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xhf_hooks.compat.transformers import accepted_options, dtype_field, text_config
from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters import hf_assets
from xhf_hooks.exporters.ask_save import SaveAnswer
from xhf_hooks.exporters.assets.base_files import LocatedBase, base_of_model
from xhf_hooks.exporters.base import CompositeExporter, ExportRequest
from xhf_hooks.exporters.find_model import adapters_in, base_path, inactive_adapters, only_adapter
from xhf_hooks.exporters.huggingface import HuggingFaceExport, HuggingFaceExporter
from xhf_hooks.exporters.lora import ADAPTER_FOLDER, AdapterExporter
from xhf_hooks.exporters.reference import Reference
from xhf_hooks.exporters.traced import TracedTensor, computed
from xhf_hooks.model import module_tensors
from xhf_hooks.planning.types import TensorSpec

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import LlavaConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: Folders of complete parts in ``LLaVAModel.to_xtuner_llava`` (xtuner ``model/llava.py``), with the llm in the
#: checkpoint itself, where ``xtuner chat CHECKPOINT --llava CHECKPOINT`` expects it. Adapters: ``<part>_adapter``.
_FOLDERS = {'llm': '', 'visual_encoder': 'visual_encoder', 'projector': 'projector'}
_ORDER = ('visual_encoder', 'projector', 'llm')  # in LlavaForConditionalGeneration
IMAGE_TOKEN, PAD_TOKEN = '<image>', '<pad>'
#: Maps names in XTuner's ``model/modules/projector`` to those in transformers' ``LlavaMultiModalProjector``.
_PROJECTOR_NAMES = {'model.0.': 'linear_1.', 'model.2.': 'linear_2.'}
#: XTuner pads the rows of embeddings to a multiple of this, "for performance reasons".
_ROWS_MULTIPLE = 64
_CHUNK_ROWS = 1024


class LlavaExporter(CompositeExporter):
    """Writes the trained parts in XTuner's layout, or transformers' LlavaForConditionalGeneration.

    Args:
        lora: 'adapter', 'merge' or 'both', if a part has an adapter. Beside merged parts the adapters go to
            ``adapter/<part>_adapter``, because XTuner would apply ``llm_adapter`` to the merged llm again.
        llava_format: One of LLAVA_FORMATS. 'xtuner' omits frozen parts, as XTuner does.

    Raises:
        OptionError: ``lora`` was given without an adapter, or is 'adapter' in a format without adapters.
        ModelError: A part cannot be exported in this format.
    """

    options: tuple[str, ...] = ('lora', 'llava_format')

    def __init__(
        self, model: nn.Module, module: str | None, lora: str | None = None, llava_format: str = 'xtuner'
    ) -> None:
        adapted = {name: child for name, child in adapters_in(model).items() if name in _FOLDERS}
        as_one_model = llava_format == 'huggingface'
        if lora is not None and not adapted:
            raise OptionError('lora', 'None, because neither llm nor visual_encoder has an adapter', lora)
        if as_one_model and lora == 'adapter':
            raise OptionError('lora', "None, 'merge' or 'both' with llava_format 'huggingface'", lora)
        lora = lora or ('merge' if as_one_model else 'adapter')
        notes = [note for child in adapted.values() for note in inactive_adapters(child)]
        if as_one_model:
            self.parts = {'': _LlavaHuggingFaceExporter(model)}
        else:
            self.parts = {}
            remedy = ", or set llava_format to 'huggingface'" if _can_be_one_model(model) else ''
            for name, folder in _FOLDERS.items():
                child = getattr(model, name)
                if name == 'projector' or name in adapted or any(p.requires_grad for p in child.parameters()):
                    if name not in adapted or lora != 'adapter':
                        self.parts[folder] = _whole(model, name, adapted)
                else:
                    base = base_of_model(child).name or 'its base model'
                    notes.append(f'{name} is frozen and not written: use {base}{remedy}')
        if lora != 'merge':
            for name, child in adapted.items():
                folder = f'{ADAPTER_FOLDER}/{name}_adapter' if lora == 'both' else f'{name}_adapter'
                self.parts[folder] = AdapterExporter(name, child, only_adapter(child))
        self.tokenizer_folder = next((folder for folder in ('', 'llm_adapter') if folder in self.parts), None)
        if self.tokenizer_folder is None:
            notes.append('the llm and its tokenizer are not written')
        self.notes = tuple(notes)
        self._model = adapted['llm'].get_base_model() if 'llm' in adapted else model.llm

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        from transformers import PreTrainedModel

        children = dict(model.named_children())
        adapted = adapters_in(model)
        return module is None and all(
            isinstance(children.get(name), PreTrainedModel) or (name in adapted and name != 'projector')
            for name in _FOLDERS
        )


def _can_be_one_model(model: nn.Module) -> bool:
    """Whether ``llava_format='huggingface'`` can be advised: that class refuses custom code and quantized parts."""
    try:
        _LlavaHuggingFaceExporter(model)
    except ModelError:
        return False
    return True


def _whole(model: nn.Module, name: str, adapted: Mapping[str, PeftModel]) -> HuggingFaceExporter:
    if name in adapted:
        return HuggingFaceExporter(model, base_path(name), {'': adapted[name]})
    return HuggingFaceExporter(model, name)


class _LlavaHuggingFaceExporter(HuggingFaceExporter):
    """Writes the result of ``LLaVAModel.to_huggingface_llava`` (xtuner ``model/llava.py``), with some differences.

    The llm may be any model of transformers, not only Llama. A frozen visual encoder is also written. Features come
    from the layer used in training. The processor has the patch size. The tokenizer gets ``<image>`` and ``<pad>``; new
    rows of the embeddings are the mean of the existing ones, where XTuner samples around it. The row of ``<image>`` is
    never used: features replace it.

    Raises:
        ModelError: A part is quantized or not a model of transformers, or the projector does not have two layers.
    """

    def __init__(self, model: nn.Module) -> None:
        adapted = adapters_in(model)
        self._parts = {name: _whole(model, name, adapted) for name in _ORDER}
        super().__init__(model, self._parts['llm']._path)
        for name in ('visual_encoder', 'llm'):
            part = self._parts[name]._model
            if not type(part).__module__.startswith('transformers.models.'):
                raise ModelError(
                    f'{name} is {type(part).__module__}.{type(part).__name__}, but LlavaForConditionalGeneration needs '
                    "a model of transformers itself; set llava_format to 'xtuner'"
                )
        depth = self._parts['projector']._model.config.depth
        if depth != len(_PROJECTOR_NAMES):
            expected = f'a projector of {len(_PROJECTOR_NAMES)} layers, found depth {depth}'
            raise ModelError(f"LlavaForConditionalGeneration has {expected}; set llava_format to 'xtuner'")
        self._select_layer = getattr(model, 'visual_select_layer', -2)

    def own_tensors(self, specs: Sequence[TensorSpec]) -> dict[str, TracedTensor]:
        """The names of LlavaForConditionalGeneration, with resized embeddings."""
        prefixes = _prefixes(self._model)
        named: dict[str, TracedTensor] = {}
        for part, exporter in self._parts.items():
            own = exporter.own_tensors(specs)
            own = self._with_new_rows(own) if part == 'llm' else own
            named.update((_renamed(name, prefixes[part]), tensor) for name, tensor in own.items())
        return named

    def _with_new_rows(self, own: dict[str, TracedTensor]) -> dict[str, TracedTensor]:
        """The llm's tensors with as many rows of embeddings as the tokens need.

        As in XTuner, rows are added up to a multiple of 64 if the tokens do not fit. (XTuner adds one row too few if
        the first of the two tokens gets the last row.)
        """
        llm = self._parts['llm'].build_reference(self._model.config, own)
        embeddings = [module for module in (llm.get_input_embeddings(), llm.get_output_embeddings()) if module]
        with_rows = {id(tensor) for module in embeddings for tensor in module.parameters()}
        names = [name for name, tensor in module_tensors(llm) if id(tensor) in with_rows]
        rows = own[names[0]].shape_and_dtype[0][0]
        tokenizer = self.base_tokenizer()
        needed = rows + 2 if not hasattr(tokenizer, 'add_tokens') else max(_with_image_token(tokenizer)[1:]) + 1
        if needed <= rows:
            return own
        wanted = -(-needed // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
        grown: dict[int, TracedTensor] = {}
        for tensor in (own[name] for name in names):
            if id(tensor) not in grown:  # a tied tensor is resized once
                shape, dtype = tensor.shape_and_dtype
                grown[id(tensor)] = computed((wanted, *shape[1:]), dtype, _with_mean_rows, tensor, wanted)
        return {name: grown.get(id(tensor), tensor) for name, tensor in own.items()}

    def written_config(self, own: Mapping[str, TracedTensor], request: ExportRequest) -> LlavaConfig:
        from transformers import LlavaConfig

        vision_own = self._of_vision(own)
        text = self._parts['llm'].written_config({n: one for n, one in own.items() if n not in vision_own}, request)
        vision = self._parts['visual_encoder'].written_config(vision_own, request)
        projector = self._parts['projector']._model.config
        config = LlavaConfig(
            text_config=text,
            vision_config=vision,
            image_seq_length=_n_patches(vision) + self._n_class_tokens(own) - 1,
            projector_hidden_act=projector.hidden_act,
            multimodal_projector_bias=projector.bias,
            vision_feature_layer=self._select_layer,
            vision_feature_select_strategy='default',  # without the class token, as in LLaVAModel.forward
            tie_word_embeddings=text.tie_word_embeddings,
        )
        config.architectures = ['LlavaForConditionalGeneration']
        setattr(config, dtype_field(config), getattr(text, dtype_field(text)))
        return config

    def find_reference(self, own: Mapping[str, TracedTensor], request: ExportRequest) -> Reference:
        reference = super().find_reference(own, request)
        reference.config.image_token_index = _rows_of(reference.config) - 2  # replaced when the tokenizer is known
        return reference

    @property
    def written_class(self) -> type[PreTrainedModel]:
        from transformers import LlavaForConditionalGeneration

        return LlavaForConditionalGeneration

    def for_older_readers(self, answer: SaveAnswer, reference: Reference) -> tuple[SaveAnswer, list[str]]:
        # The llm was loaded, and knows the names in its files; the reference was not
        return hf_assets.for_older_readers(self._model, answer, reference.config, LocatedBase())

    def write_hf_assets(
        self, export: HuggingFaceExport, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]
    ) -> list[str]:
        config = copy.deepcopy(export.config)
        warnings = []
        tokenizer = getattr(tokenizer, 'tokenizer', tokenizer)  # a processor's
        if not hasattr(tokenizer, 'add_tokens'):
            tokenizer = None  # what is copied cannot get it, either
            warnings.append(f'no tokenizer: config.json has {config.image_token_index} as the id of {IMAGE_TOKEN}')
        else:
            tokenizer, image_id, pad_id = _with_image_token(tokenizer)
            if max(image_id, pad_id) >= _rows_of(config):
                raise ModelError(
                    f'with {IMAGE_TOKEN} and {PAD_TOKEN}, the tokenizer has {len(tokenizer)} tokens, but the '
                    f'embeddings have {_rows_of(config)} rows, for the tokenizer of the base model '
                    f'{self.base_model.name!r}; give that one (the option tokenizer; in xhf-convert, beside the '
                    f'checkpoint or in --base), or call resize_token_embeddings before training'
                )
            config.image_token_index, config.pad_token_id = image_id, pad_id
        warnings += hf_assets.write(folder, self._model, export.answer, tokenizer, eos_token_ids, LocatedBase())
        hf_assets.write_config(folder, config)
        return warnings + self._write_processor(export, folder)

    def _write_processor(self, export: HuggingFaceExport, folder: Path) -> list[str]:
        """Write the files of LlavaProcessor's ``save_pretrained``, without building an image processor.

        Only with the settings that the installed class takes: one more, and it does not load.
        """
        from transformers import LlavaProcessor

        vision_base = self._parts['visual_encoder'].base_model
        preprocessor = vision_base.read_file('preprocessor_config.json')
        if preprocessor is None:
            return [
                f'no processor was written: {vision_base.name!r}, the visual encoder, has no preprocessor_config.json'
            ]
        (folder / 'preprocessor_config.json').write_bytes(preprocessor)
        settings = {
            'image_token': IMAGE_TOKEN,
            'patch_size': export.config.vision_config.patch_size,
            'num_additional_image_tokens': self._n_class_tokens(export.own),
            'vision_feature_select_strategy': export.config.vision_feature_select_strategy,
        }
        taken = accepted_options(LlavaProcessor, settings)
        processor = {'processor_class': 'LlavaProcessor', **taken}
        (folder / 'processor_config.json').write_text(json.dumps(processor, indent=2) + '\n')
        if taken == settings:
            return []
        left_out = ', '.join(f'{name}={value!r}' for name, value in settings.items() if name not in taken)
        return [
            f'processor_config.json: LlavaProcessor of the installed transformers takes no {left_out}; to load the '
            f'processor with a newer transformers, add these settings there'
        ]

    def _n_class_tokens(self, own: Mapping[str, TracedTensor]) -> int:
        """Number of class tokens in the visual encoder's output: 1 for CLIP, 0 for SigLIP."""
        positions = [one for n, one in self._of_vision(own).items() if n.endswith('position_embedding.weight')]
        n_patches = _n_patches(self._parts['visual_encoder']._model.config)
        return positions[0].shape_and_dtype[0][0] - n_patches if positions else 1

    def _of_vision(self, own: Mapping[str, TracedTensor]) -> dict[str, TracedTensor]:
        (prefix,) = _prefixes(self._model)['visual_encoder'].values()
        return {name: tensor for name, tensor in own.items() if name.startswith(prefix)}


def _rows_of(config: PretrainedConfig) -> int:
    """Rows of the embeddings."""
    return text_config(config).vocab_size


def _with_mean_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Extend a tensor ``(vocab, ...)`` to ``(rows, ...)``: new rows are the mean of the existing ones.

    The mean is computed in float64, so that it does not depend on the order of summation by threads.
    """
    total = sum(chunk.double().sum(dim=0) for chunk in weight.split(_CHUNK_ROWS))
    mean = (total / len(weight)).to(weight.dtype)
    return torch.cat([weight, mean.expand(rows - len(weight), *weight.shape[1:])])


def _with_image_token(tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, int, int]:
    """A copy with the tokens ``<image>`` and ``<pad>`` (its padding token), and their ids."""
    from transformers import AddedToken

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(AddedToken(IMAGE_TOKEN, special=True, normalized=False), special_tokens=True)
    tokenizer.add_special_tokens({'pad_token': PAD_TOKEN})
    image_id, pad_id = tokenizer.convert_tokens_to_ids([IMAGE_TOKEN, PAD_TOKEN])
    return tokenizer, image_id, pad_id


def _n_patches(vision: PretrainedConfig) -> int:
    return (vision.image_size // vision.patch_size) ** 2


def _prefixes(llm: PreTrainedModel) -> dict[str, Mapping[str, str]]:
    """Maps old to new name prefixes, by part; the first match counts."""
    import transformers

    # Since 4.52, LlavaForConditionalGeneration is a LlavaModel with a head
    nested = hasattr(transformers, 'LlavaModel')
    inside = 'model.' if nested else ''
    language = {f'{llm.base_model_prefix}.': 'model.language_model.', '': ''} if nested else {'': 'language_model.'}
    projector = {old: f'{inside}multi_modal_projector.{new}' for old, new in _PROJECTOR_NAMES.items()}
    return {'visual_encoder': {'': f'{inside}vision_tower.'}, 'projector': projector, 'llm': language}


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    old, new = next((old, new) for old, new in prefixes.items() if name.startswith(old))
    return new + name.removeprefix(old)
