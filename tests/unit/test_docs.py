"""What the pages name is there (files, options, messages, tests, links), and their figures are those measured."""

import ast
import json
import re
from dataclasses import fields
from html import unescape
from pathlib import Path

import pytest

from tools import options_page
from xhf_hooks.options import CallOptions, HookOptions
from xhf_hooks.system.versions import __version__

ROOT = Path(__file__).parents[2]
BENCH = ROOT / 'docs' / 'bench'
OUTER = ['README.md', 'README_zh-CN.md', 'CONTRIBUTING.md', 'SECURITY.md', 'CHANGELOG.md', 'RELEASING.md']
PAGES = {path.name: path.read_text(encoding='utf-8') for path in (ROOT / 'docs').glob('*.md')}
PAGES |= {name: (ROOT / name).read_text(encoding='utf-8') for name in OUTER}
#: What stands in backticks, on one line, and is not gone.
SPANS = {
    span for text in PAGES.values() for span in re.findall(r'(?<!`)`([^`\n]+)`(?!`)', text.partition('### Removed')[0])
}
FOLDERS = [ROOT / name for name in ('xhf_hooks', 'tools', 'configs')]
CODE = '\n'.join(
    path.read_text(encoding='utf-8') for folder in FOLDERS for end in ('py', 'sh') for path in folder.rglob(f'*.{end}')
)
#: Names and options of other programs, and of this package's tests.
OTHERS = {
    'client_kwargs', 'collective_rpc', 'dequantize', 'dispatch_batches', 'dp_replicate_size', 'fsdp_config',
    'fsdp_size', 'model_wrapper', 'pickle_module', 'read_base', 'reload_weights', 'run_scenarios', 'save_optimizer',
    'shard_placement_fn', 'target_parameters', 'text_hidden_fcs', 'tp_size', 'vis_backends', '--adapter',
    '--add_version', '--callbacks', '--delete', '--device', '--exclude', '--external_plugins', '--fp', '--is-clip',
    '--output_dir', '--private', '--prompt-template', '--recursive', '--revision', '--safe-serialization',
    '--save-format', '--signal', '--visual-encoder', '--wait',
}  # fmt: skip
#: Folders and files of runs, and of others.
ELSEWHERE = {
    'adapter/llm_adapter/', 'adapter/visual_encoder_adapter/', 'convert_hf_to_gguf.py', 'convert_to_hf.py',
    'convert_to_official.py', 'epoch_1.pth/', 'hf_checkpoint.py', 'iter_500.pth/', 'llm_adapter/', 'other_modules/',
    'projector/', 'projects/llava_sam2/hf/convert_to_hf.py', 'tests/trainers/test_NAME.py', 'visual_encoder/',
    'zero_to_fp32.py',
}  # fmt: skip
MESSAGES = re.findall(r'^\| `([^`]+)` \|', PAGES['troubleshooting.md'].partition('## Not an error of this')[0], re.M)
assert len(MESSAGES) >= 30
#: What a value that varies may be: anything, but not what ends one message and begins the next.
VARIES = '…'


def texts() -> list[str]:
    """Every string of the package, with what varies in it as one sign."""
    found = []
    for path in (ROOT / 'xhf_hooks').rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else VARIES for part in node.values]
                found.append(''.join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


TEXTS = texts()


def test_files_that_are_named_are_there():
    """By their path from the root, or below the package or the helpers of tests."""
    named = {span for span in SPANS if re.fullmatch(r'[\w./-]*\w(\.(py|sh)|/)', span)}
    named |= {
        path for span in SPANS for path in re.findall(r'\b(?:tools|tests|configs|docs|requirements)/[\w./-]+', span)
    }
    tops = [top for top in ROOT.iterdir() if not top.name.startswith('.') and top.name != 'work_dirs']
    paths = {path for top in tops for path in (top, *top.rglob('*'))}
    there = [f'/{path.relative_to(ROOT)}' for path in paths]
    assert len(named) > 60
    assert {
        name for name in named - ELSEWHERE if not any(path.endswith(f'/{name.rstrip("/")}') for path in there)
    } == set()


def test_options_and_other_names_are_in_the_code():
    names = {span for span in SPANS if re.fullmatch(r'[a-z]+(_[a-z]+)+', span)}
    names |= {name for span in SPANS for name in re.findall(r'(?<![\w.-])([a-z][a-z_]+)=', span)}
    names |= {flag for span in SPANS for flag in re.findall(r'(?<![\w-])--[a-z][a-z_-]+', span)}
    assert len(names) > 80
    assert {n for n in names - OTHERS if not re.search(rf'(?<![\w-]){re.escape(n)}(?![\w-])', CODE)} == set()


@pytest.mark.parametrize('message', MESSAGES)
def test_the_message_is_one_of_the_package(message):
    fixed = [part.strip() for part in message.split(VARIES) if len(part.strip()) > 2]
    pattern = '.*?'.join(map(re.escape, fixed))
    assert any(re.search(pattern, text, flags=re.DOTALL) for text in TEXTS), f'no message of the package: {fixed}'


def test_tests_that_are_named_are_there():
    there = {path.stem for path in (ROOT / 'tests').rglob('test_*.py')}
    texts = [*PAGES.values(), *(page.read_text(encoding='utf-8') for page in (ROOT / 'docs' / 'zh_cn').glob('*.md'))]
    groups = [group for text in texts for group in re.findall(r'\[(test_[\w, ]+)\]', text)]
    named = {name for group in groups for name in group.split(', ')}
    assert len(named) > 40 and not named - there


@pytest.mark.parametrize('page', OUTER)
def test_the_links_lead_somewhere(page):
    """Sphinx checks those of docs/."""
    links = re.findall(r'\]\(([^):#]+)[^):]*\)', PAGES[page])
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_chinese_readme_says_the_same():
    """Its code and figures, and its links: to the Chinese page where there is one."""
    pages = [PAGES['README.md'], PAGES['README_zh-CN.md']]
    for found in (code_of, lambda page: re.findall(r'\d+(?:\.\d+)?', page)):
        english, chinese = (sorted(found(page)) for page in pages)
        assert english == chinese and len(english) >= 6
    english, chinese = (re.findall(r'\]\((?!README)([^)#]+)(#[^)]+)?\)', page) for page in pages)
    assert sorted(in_chinese(link) for link, _ in english) == sorted(link for link, _ in chinese)
    assert sorted(link for link, heading in english if heading) == sorted(
        link.replace('zh_cn/', '') for link, heading in chinese if heading
    )


def code_of(page: str) -> list[str]:
    """The blocks of code, without what is translated: comments, and what a tree of files says of each."""
    blocks = re.findall(r'(?ms)^```.*?^```$', page)
    return [re.sub(r'(?m)(?<=\S)(  # | {3,}(?=\S)).*$', '', block) for block in blocks]


def in_chinese(link: str) -> str:
    """The Chinese page of a page, or the page itself."""
    translated = link.replace('docs/', 'docs/zh_cn/', 1)
    return translated if (ROOT / translated).is_file() else link


def heading_links(page: Path) -> set[str]:
    """The links that GitHub and MyST make of a page's headings."""
    headings = re.findall(r'(?m)^#+ (.*)$', re.sub(r'(?ms)^```.*?^```$', '', page.read_text(encoding='utf-8')))
    return {re.sub(r'[^\w -]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', OUTER)
def test_the_headings_that_are_linked_are_there(page):
    links = re.findall(r'\]\(([^):#]+\.md)#([^)]+)\)', PAGES[page])
    assert [link for link in links if link[1] not in heading_links(ROOT / link[0])] == []


def test_the_version_is_the_same_everywhere():
    """Of the package, the changelog, the citation, and the notes of the tag that RELEASING.md makes."""
    newest = re.search(r'(?m)^## ([\d.]+) \(', PAGES['CHANGELOG.md'])
    assert newest is not None and newest[1] == __version__
    assert f'\nversion: {__version__}\n' in (ROOT / 'CITATION.cff').read_text(encoding='utf-8')
    assert (ROOT / 'RELEASE_NOTES.md').read_text(encoding='utf-8').startswith(f'xhf_hooks {__version__}\n')
    commands = (ROOT / 'RELEASING.md').read_text(encoding='utf-8')
    assert set(re.findall(r'\bv?(\d+\.\d+\.\d+)\b', commands)) == {__version__}


def test_what_was_removed_is_no_option():
    """Where only a value or a form of an option went, the option stays."""
    removed = PAGES['CHANGELOG.md'].partition('### Removed')[2]
    names = set(re.findall(r'(?m)^- `([a-z_]+)[`=]', removed))
    stay = {'out_dir', 'upload_to', 'on_saved', 'verify', 'llava_format'}
    options = {field.name for kind in (HookOptions, CallOptions) for field in fields(kind)}
    assert len(names) >= 12 and names & options == stay


def test_what_the_readme_counts_of_xtuners_configs():
    """docs/xtuner_configs.md is compared with the configs themselves in XTuner's environment."""
    lines = PAGES['xtuner_configs.md'].splitlines()
    rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines if line.startswith('| ')]
    saved = sum(int(count) for _, _, exporter, count, _ in rows[1:-1] if not exporter.startswith('none'))
    n_configs = rows[-1][3]
    sentence = f'XTuner 0.2.0 comes with {n_configs} configs. The hook saves the models of {saved} of them'
    assert '# XTuner 0.2.0: ' in lines[0]
    assert sentence in ' '.join(PAGES['xtuner.md'].split())
    for page in ('README.md', 'what-works.md'):
        assert f'{saved} of the {n_configs} configs' in ' '.join(PAGES[page].split())


def test_the_page_of_options_is_made_from_their_descriptions():
    assert PAGES['options.md'] == options_page.page()
    chinese = (ROOT / 'docs' / 'zh_cn' / 'options.md').read_text(encoding='utf-8')
    assert chinese == options_page.page(options_page.CHINESE)


# Figures


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))


@pytest.mark.parametrize('what', sorted(file.stem for file in BENCH.glob('*.json')))
def test_the_table_is_the_one_measured(tools, what):
    """docs/bench/WHAT.json is what the benchmark wrote when the page's table was made."""
    from bench.report import table

    measured = json.loads((BENCH / f'{what}.json').read_text())
    assert table(what, measured) == (BENCH / f'{what}.md').read_text(), 'made by tools/bench.py'
    assert f'{{include}} bench/{what}.md' in PAGES['performance.md']
    assert f'python tools/bench.py {what}\n' in PAGES['performance.md']
    assert measured.get('date', '') in PAGES['performance.md']


def test_the_readme_shows_what_was_measured(tools):
    from bench.report import summary

    head, *rows = summary(json.loads((BENCH / 'save.json').read_text())).strip().splitlines()
    for page in ('README.md', 'README_zh-CN.md'):
        assert '\n'.join(rows) in PAGES[page] and '(docs/bench/save.svg)' in PAGES[page]
    assert head in PAGES['README.md']


@pytest.mark.parametrize('page', ['README.md', 'README_zh-CN.md'])
def test_the_readme_is_short(page):
    assert len(PAGES[page].splitlines()) <= 130


def words_of(drawn: Path) -> set[str]:
    """The text of an SVG, without the version of matplotlib."""
    words = {unescape(word).strip() for word in re.findall(r'>([^<>]+)<', drawn.read_text())}
    return {word for word in words if not word.startswith('Matplotlib v')}


@pytest.mark.parametrize('file', sorted(BENCH.glob('*.svg')), ids=lambda file: file.stem)
def test_the_chart_has_the_figures(tools, file, tmp_path):
    """`python tools/bench.py draw --out docs/bench` draws them again; the bytes depend on the version of matplotlib."""
    from bench.chart import draw

    draw(json.loads(file.with_suffix('.json').read_text()), tmp_path / 'drawn.svg')
    assert words_of(tmp_path / 'drawn.svg') == words_of(file)


#: Of docs/, in both languages.
CHINESE = sorted(
    path.name for path in (ROOT / 'docs' / 'zh_cn').glob('*.md') if path.name not in ('index.md', 'options.md')
)


@pytest.mark.parametrize('name', CHINESE)
def test_the_chinese_page_says_the_same(name):
    """As many headings and rows, the same code, and the same names of options, files and messages."""
    pages = [path.read_text(encoding='utf-8') for path in (ROOT / 'docs' / name, ROOT / 'docs' / 'zh_cn' / name)]
    for found in (code_of, lambda page: re.findall(r'(?m)^#+ ', page)):
        english, chinese = (found(page) for page in pages)
        assert english == chinese
    if name != 'versions.md':  # whose long tables are in English alone
        english, chinese = (len(re.findall(r'(?m)^\|', page)) for page in pages)
        assert english == chinese
    english, chinese = (set(re.findall(r'`([a-z]+(?:_[a-z]+)+=?[^`]*)`', page)) for page in pages)
    assert chinese <= english


def test_a_meaning_that_was_translated_before_it_changed_is_told(tmp_path, monkeypatch):
    told = (ROOT / 'docs' / 'zh_cn' / 'options.json').read_text(encoding='utf-8')
    changed = json.loads(told)
    changed['dtype']['of'] = 'that of another meaning'
    (tmp_path / 'docs' / 'zh_cn').mkdir(parents=True)
    (tmp_path / 'docs' / 'zh_cn' / 'options.json').write_text(json.dumps(changed), encoding='utf-8')
    monkeypatch.setattr(options_page, 'ROOT', tmp_path)
    with pytest.raises(SystemExit, match='the meaning of dtype in'):
        options_page.page(options_page.CHINESE)
