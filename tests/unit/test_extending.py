"""What an extension may import and register, which of its classes is used, and how its mistakes are told."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import xhf_hooks
from tests.helpers.checks.compare import assert_same_tensors, folder_tensors
from tests.helpers.checks.pages import blocks, code
from tests.helpers.models.zoo import build
from xhf_hooks import exporters, extending, save_hf, sources
from xhf_hooks.errors import AgreedError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.extending import (
    EXPORTERS,
    SOURCES,
    Axis,
    Export,
    ExportEntry,
    Exporter,
    HuggingFaceExporter,
    Source,
    Spread,
    TensorSpec,
    WholeTensorsSource,
)
from xhf_hooks.sources import source_for

PACKAGE = Path(xhf_hooks.__file__).parent
PAGE = PACKAGE.parent / 'docs' / 'extending.md'


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Each test has registries of its own."""
    for registry in (SOURCES, EXPORTERS):
        monkeypatch.setattr(registry, 'module_dict', dict(registry.module_dict))


def all_below(cls: type) -> list[type]:
    return [found for each in cls.__subclasses__() for found in (each, *all_below(each))]


@pytest.mark.parametrize(
    ('registry', 'package', 'base'), [(SOURCES, sources, Source), (EXPORTERS, exporters, Exporter)]
)
def test_all_classes_of_ours_that_accept_a_model_stand_in_one_order(registry, package, base):
    """None is registered by being imported, and none stands behind a class from which it derives."""
    built_in = [*registry.last_first(), *package.BUILT_IN]
    ours = [one for one in all_below(base) if one.__module__.startswith('xhf_hooks.') and 'accepts' in vars(one)]
    assert len(ours) > 4 and {*ours} == {*built_in}
    assert not [
        (earlier, later)
        for place, earlier in enumerate(built_in)
        for later in built_in[place + 1 :]
        if issubclass(later, earlier)
    ]
    assert not {**SOURCES.module_dict, **EXPORTERS.module_dict}


def test_of_registered_classes_the_last_one_is_used_and_before_ours():
    chosen = []
    for name in ('First', 'Second'):
        accepts = classmethod(lambda cls, model, *module: hasattr(model, 'mine'))
        chosen.append(SOURCES.register_module()(type(name, (WholeTensorsSource,), {'accepts': accepts})))
        EXPORTERS.register_module()(type(name, (HuggingFaceExporter,), {'accepts': accepts}))
        model = build('llama')
        assert type(source_for(model)) is WholeTensorsSource
        assert type(exporter_for(model, None)) is HuggingFaceExporter
        model.mine = True
        assert type(source_for(model)).__name__ == type(exporter_for(model, None)).__name__ == name
    SOURCES.register_module()(chosen[0])  # again, as in a notebook: now it is the last one
    assert type(source_for(model)) is chosen[0]


def test_a_registered_source_is_asked_before_models_are_refused():
    """Of a model that ours would refuse, since ranks hold different experts of it."""
    Pipeline = type('PipelineModule', (nn.Module,), {'__module__': 'deepspeed.pipe'})
    model = Pipeline()
    with pytest.raises(xhf_hooks.errors.ModelError, match='pipeline parallelism'):
        source_for(model)

    @SOURCES.register_module()
    class PipelineSource(WholeTensorsSource):
        @classmethod
        def accepts(cls, model):
            return isinstance(model, Pipeline)

    assert type(source_for(model)) is PipelineSource


def test_the_page_imports_from_one_module_alone():
    examples = [block for block in blocks('python', 'extending.md') if 'xhf_hooks' in block]
    assert len(examples) == 3
    for example in examples:
        imports = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.ImportFrom)]
        ours = [node for node in imports if node.module.startswith('xhf_hooks')]
        assert [node.module for node in ours] == ['xhf_hooks.extending']
        assert {alias.name for alias in ours[0].names} <= {*extending.__all__}
        assert not re.findall(r'(?:self|super\(\)|tensor|model)\._(?!_)\w+', example.replace('self._sizes', ''))


def test_that_module_is_complete():
    """All its names are there and explained, none is private, and the page's table names methods that exist."""
    for name in extending.__all__:
        assert inspect.getdoc(getattr(extending, name)) and not name.startswith('_'), name
    table = PAGE.read_text().partition('| what your engine does |')[2].partition('\n\n')[0]
    methods = {name for name in re.findall(r'`(?:self\.)?(\w+)', table)} - {'spec', 'engine'}  # those are none
    assert len(methods) > 8
    assert not [name for name in methods if not hasattr(WholeTensorsSource, name) and not hasattr(extending, name)]


class WorldModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = [3, 4]
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)


def test_a_model_that_is_none_of_transformers(tmp_path):
    exec(code('class WorldModelExporter', 'extending.md'), {})
    model = WorldModel()
    committed = save_hf(model, tmp_path / 'out')
    assert_same_tensors(folder_tensors(committed.path), model.state_dict())
    assert not (committed.path / 'README.md').exists()  # transformers would not load it as the card would say


def test_what_any_exporter_leaves_out_or_warns_of_is_told(tmp_path, caplog):
    @EXPORTERS.register_module()
    class NetAlone(Exporter):
        def __init__(self, model, module): ...

        @classmethod
        def accepts(cls, model, module):
            return isinstance(model, WorldModel)

        def export(self, request):
            written = {spec.name: spec for spec in request.specs if spec.name.startswith('net.')}
            entries = tuple(extending.unchanged_entries(written, None, extending.FileSet()))
            return Export(entries=entries, warnings=('of the export',))

        def write_hf_assets(self, export, folder, tokenizer, eos_token_ids):
            return ['of the files']

    caplog.set_level('INFO')
    model = WorldModel()
    model.head.bias.requires_grad_(False)
    committed = save_hf(model, tmp_path / 'out')
    assert committed.warnings == ('of the export', 'of the files')
    assert all(caplog.text.count(warning) == 1 for warning in committed.warnings)
    assert 'trained, but not saved: 1 tensor (head.weight)' in caplog.text
    assert 'not exported: 1 tensor (head.bias)' in caplog.text
    assert '    from   WholeTensorsSource, for NetAlone' in caplog.text


def spec(shape=(2, 3), dtype='F32', aliases=()):
    return TensorSpec('w', shape, dtype, aliases)


def entry(shape=(2, 3), dtype='F32', reads=('w',)):
    return ExportEntry('w', shape, dtype, reads)


SPECS, ENTRIES = [spec()], [entry()]


def error_of_extensions(folder, specs=SPECS, entries=ENTRIES, spread=None, gathered=None):
    """The error of a save by a source and an exporter that return these."""

    @SOURCES.register_module()
    class Mine(Source):
        def __init__(self, model): ...

        accepts = classmethod(lambda cls, model: isinstance(model, WorldModel))

        def specs(self):
            return specs

        def spread(self, specs, collective):
            return spread or {}

        def gathered(self, specs, wanted):
            return gathered or {}

    @EXPORTERS.register_module()
    class Out(Exporter):
        def __init__(self, model, module): ...

        accepts = classmethod(lambda cls, model, module: isinstance(model, WorldModel))

        def export(self, request):
            return Export(entries=entries)

        def write_hf_assets(self, export, folder, tokenizer, eos_token_ids):
            return []

    with pytest.raises(AgreedError) as caught:
        save_hf(WorldModel(), folder / 'out')
    return str(caught.value)


@pytest.mark.parametrize(
    ('specs', 'words'),
    [
        ([spec(), spec()], r'w: expected each name once, found it twice'),
        ([spec(dtype=torch.float32)], r"w: .*such as 'BF16'.*found torch\.float32"),
        ([spec(torch.Size([2, 3])), None], r'.*found NoneType in it'),
        ([spec([2, 3])], r'w: expected the shape as a tuple'),
        (None, r'expected a list of TensorSpec, found NoneType'),
    ],
)
def test_specs_are_checked_at_the_door(tmp_path, specs, words):
    assert re.search(rf'Mine\.specs\(\): {words}', error_of_extensions(tmp_path, specs))


@pytest.mark.parametrize(
    ('specs', 'entries', 'words'),
    [
        (SPECS, [entry(reads=('v',))], r"w: expected in reads .*found 'v'"),
        (SPECS, [entry(reads='w')], r'w: expected reads to be a tuple'),
        (SPECS, [entry((3, 2))], r'w: without combine, expected the shape'),
        (SPECS, [entry(dtype='float32')], r"w: .*found 'float32'"),
        (SPECS, None, r'expected a list of ExportEntry, found NoneType'),
        (
            [spec(aliases=('tied',))],
            [entry(reads=('tied',))],
            r"w: .*found 'tied', which is another name of w: read that",
        ),
    ],
)
def test_entries_are_checked_at_the_door(tmp_path, specs, entries, words):
    assert re.search(rf'Out\.export\(\): {words}', error_of_extensions(tmp_path, specs, entries))


@pytest.mark.parametrize(
    ('spread', 'words'),
    [
        ({'w': Spread(5, ())}, r': w: expected 6 elements, held by 1 rank, found Spread\(numel=5'),
        ({'w': Spread(6, (Axis(1, 1, 5),))}, r': w: expected 6 elements, held by 1 rank, found Spread\(numel=6'),
        ({'w': Spread(6, (Axis(1, 2, 3),))}, r': w: expected 6 elements, held by 1 rank, found Spread\(numel=6'),
        ({'v': Spread(6, ())}, r': expected a Spread for names of tensors alone'),
        ({'w': None}, r': expected a Spread .*found None'),
        ({'w': Spread(6, ())}, r' names w: it needs local_elements\(\)'),
    ],
)
def test_what_a_source_says_of_ranks_is_checked(tmp_path, spread, words):
    assert re.search(rf'Mine\.spread\(\){words}', error_of_extensions(tmp_path, spread=spread))


@pytest.mark.parametrize(
    ('gathered', 'words'),
    [
        ({}, 'expected the whole tensor, found NoneType'),
        ({'w': [1.0]}, 'expected the whole tensor, found list'),
        ({'w': torch.zeros(3, 2)}, r'expected F32 \(2, 3\), found torch\.float32 \(3, 2\)'),
    ],
)
def test_what_a_source_reads_is_checked(tmp_path, gathered, words):
    assert re.search(rf'w: Mine\.gathered\(\): {words}', error_of_extensions(tmp_path, gathered=gathered))


def test_an_error_of_shapes_names_the_source(tmp_path):
    @SOURCES.register_module()
    class Mine(WholeTensorsSource):
        accepts = classmethod(lambda cls, model: hasattr(model, 'mine'))

        def full_shape(self, tensor):
            return (1, *tensor.shape)

    model = build('llama')
    model.mine = True
    with pytest.raises(AgreedError, match=r'\(Mine read the names and shapes for HuggingFaceExporter\)'):
        save_hf(model, tmp_path / 'out')
