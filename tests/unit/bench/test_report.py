"""Tables and charts are made of the JSON alone, and those that lie there are what it gives."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from html import unescape
from pathlib import Path

import pytest
from bench.charts import CHARTS, draw, sections
from bench.report import fastest, table
from bench.ways import BY, FLOOR, FLOOR_FSYNC, XTUNER

ROOT = Path(__file__).parents[3]
MEASURED = sorted((ROOT / 'docs' / 'bench').glob('*.json'))


@pytest.fixture(scope='module')
def command():
    """tools/bench.py, whose name the folder beside it has, too."""
    spec = importlib.util.spec_from_file_location('bench_command', ROOT / 'tools' / 'bench.py')
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def words_of(drawn: Path) -> set[str]:
    """The text of an SVG."""
    return {unescape(word).strip() for word in re.findall(r'>([^<>]+)<', drawn.read_text())}


@pytest.mark.parametrize('file', MEASURED, ids=lambda file: file.stem)
def test_the_chart_has_the_figures(file):
    """`python tools/bench.py draw --out docs/bench` draws them again; the bytes depend on the version of matplotlib."""
    drawn = words_of(file.with_suffix('.svg'))
    parts = sections(file.stem, json.loads(file.read_text()))
    for _, figures in parts:
        for found in figures.values():
            assert {words.format(found[key]) for key, _, words in CHARTS[file.stem][1] if key in found} <= drawn
    assert all(figures for _, figures in parts)


def test_no_chart_without_figures():
    assert {file.stem for file in (ROOT / 'docs' / 'bench').glob('*.svg')} == {file.stem for file in MEASURED}


def test_one_command_measures_all_that_is_quoted(command):
    assert set(command.BENCHES) >= {file.stem for file in MEASURED}


def test_the_help_begins_with_examples_that_parse(command):
    parser = command.make_parser()
    first, *lines = parser.format_help().partition('\n\nusage:')[0].splitlines()
    examples = [line.split()[2:] for line in lines if line.startswith('  python tools/bench.py ')]
    assert first == 'examples:' and len(examples) >= 3
    for example in examples:
        assert parser.parse_args(example).what == example[0]


def test_every_option_is_explained(command):
    (commands,) = [action for action in command.make_parser()._actions if action.dest == 'what']
    for what, parser in commands.choices.items():
        unexplained = [action.dest for action in parser._actions if not action.help]
        assert not unexplained and parser.description, what


def test_all_runs_each_in_its_environment(command, tmp_path, monkeypatch):
    python = tmp_path / 'env' / 'bin' / 'python'
    python.parent.mkdir(parents=True)
    python.touch()
    launched: list[list[str]] = []

    def launch(line: list[str], **_: object) -> None:
        launched.append(line)

    monkeypatch.setattr(command.subprocess, 'run', launch)
    parser = command.make_parser()
    args = parser.parse_args(['all', '--xtuner-env', str(tmp_path / 'env'), '--out', str(tmp_path)])
    command.run_all(args)
    pythons = {line[2]: line[0] for line in launched}
    assert set(pythons) == set(command.BENCHES)
    assert pythons.pop('convert') == str(python) and set(pythons.values()) == {sys.executable}
    assert all(line[3:] == ['--out', str(tmp_path)] for line in launched)


def test_all_refuses_at_once_where_an_environment_is_missing(command, tmp_path):
    parser = command.make_parser()
    args = parser.parse_args(['all', '--xtuner-env', str(tmp_path / 'none'), '--out', str(tmp_path)])
    with pytest.raises(SystemExit, match='--xtuner-env'):
        command.run_all(args)


def test_a_chart_is_drawn(tmp_path):
    runs = {'theirs': [{'seconds': 8.0}], 'xhf_hooks stream': [{'seconds': 2.0, 'peak_extra_mb': 1.0}]}
    size = {'parameters': 10**8, 'nbytes': 2 * 10**8, 'runs': runs}
    measured = {'machine': {'cpu': '<cpu>', 'cores': 2}, 'ranks': 2, 'sizes': [size]}
    for name in 'ab':
        draw('save', measured, tmp_path / name)
    assert (tmp_path / 'a').read_bytes() == (tmp_path / 'b').read_bytes()
    assert {'8.00', '2.00', '1', '<cpu>, 2 cores', 'theirs', 'xhf_hooks stream'} <= words_of(tmp_path / 'a')


def test_of_a_floor_the_fastest_way_counts():
    names = [FLOOR, f'{FLOOR_FSYNC}{BY}O_DIRECT', f'{FLOOR_FSYNC}{BY}sync_file_range', XTUNER]
    found = {name: {'seconds': seconds} for name, seconds in zip(names, (1.0, 3.0, 2.0, 9.0), strict=True)}
    assert list(fastest(found)) == [names[0], names[2], names[3]]


def _run(seconds: float, **more: float) -> list[dict[str, float]]:
    return [{'seconds': seconds, 'peak_extra_mb': 7.0, 'sent_mb': 50.0, **more}]


def test_the_table_of_some_ways_alone():
    """Without what the other columns compare with."""
    size = {'parameters': 10**8, 'nbytes': 2 * 10**8, 'runs': {'xhf_hooks stream, without fsync': _run(2.0)}}
    lines = table('save', {'sizes': [size]}).splitlines()
    assert lines[2] == '| way | seconds | extra memory, MB | sent to other ranks, MB |'
    assert lines[4] == '| xhf_hooks stream, without fsync | 2.00 | 7 | 50 |'


def test_a_throttled_save_is_compared_with_what_the_limit_allows():
    runs = {
        'xhf_hooks stream': _run(7.0, written_by_busiest_mb=1800.0),
        'xhf_hooks parallel': _run(3.5, written_by_busiest_mb=900.0),
    }
    case = {'parameters': 9 * 10**8, 'nbytes': 1_800_000_000, 'ranks': 2}
    words = table('throttled', {'cases': [{**case, 'limit_nbytes_per_sec': 3e8, 'limited_runs': runs}]})
    assert '2 ranks, none of which can write more than 300 MB/s' in words
    assert '| xhf_hooks parallel | 3.50 | 2.0 | 3.00 |' in words


def test_memory_by_size_and_ranks():
    figures = {'peak_rank0_mb': 250.0, 'peak_others_mb': 90.0}
    runs = {'xhf_hooks stream, with fsync, as the hook': _run(1.0, **figures)}
    cases = [
        {'ranks': ranks, 'parameters': size, 'nbytes': 100_000_000, 'runs': runs}
        for ranks in (2, 4)
        for size in (10**8, 10**9)
    ]
    words = table('memory', {'bucket_nbytes': 128_000_000, 'cases': cases})
    assert '| way | ranks | 0.10 B | 1.00 B | sent, of the model |' in words
    assert '| xhf_hooks stream | 4 | 250 / 90 | 250 / 90 | 50% |' in words
