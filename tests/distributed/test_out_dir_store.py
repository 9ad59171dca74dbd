"""``out_dir='s3://...'``: every rank uploads its own files; the same bytes as in a local folder."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.test_on_saved import log_text, scalars
from tests.helpers import on_stored_program
from tests.helpers.compare import assert_same_folder_tensors
from tests.helpers.engines import zero_engine
from tests.helpers.faulty_proxy import EachInTurn, faulty_proxy
from tests.helpers.peak_sampler import PeakSampler
from tests.helpers.s3_servers import BUCKET, CREDENTIALS, s3_server
from tests.helpers.scenarios import check, run_scenarios
from xhf_hooks import system

N_RANKS = 3
SMALL = dict(bucket_size=20_000, max_shard_size=9_000)
#: What is saved and how, and whether all ranks write.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    'ZeRO-3': (dict(stage=3), SMALL, True),
    'one file': (dict(stage=3), dict(bucket_size=20_000), False),
    'rank 0 alone': (dict(stage=3), dict(SMALL, writer='stream'), False),
    'read back': (dict(stage=3), dict(SMALL, verify='full'), True),
    'both': (dict(stage=3, lora=True), dict(SMALL, lora='both'), True),
}
#: Of each server.
CASES_OF = {'moto': [*CASES], 'rclone': ['ZeRO-3', 'both']}


def save_to_both(case: str, server: Any, root: Path) -> dict[str, Any]:
    """Save to the store and to a folder. Runs on: all ranks."""
    import torch.distributed as dist

    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks import save_hf
    from xhf_hooks.places import store as stored

    kind, how, _ = CASES[case]
    kind = dict(kind)
    stage = kind.pop('stage')
    engine = zero_engine(odd_llama(bf16=True, **kind), stage)
    made, send = [], stored.send_file

    def note(store: Any, prefix: str, name: str, *args: Any, **more: Any) -> None:
        made.extend([name] if name.endswith('.safetensors') else [])
        send(store, prefix, name, *args, **more)

    with mock.patch.object(stored, 'send_file', note):
        url = f's3://{BUCKET}/läufe/{case}'
        committed = save_hf(engine, url, backend_args=server.backend_args, step=7, **how)
    dist.barrier()
    left = [str(path) for path in Path(tempfile.gettempdir()).glob(f'{system._PREFIX}*')]
    save_hf(engine, root / case / 'local', **{**how, 'writer': 'auto'})
    engine.destroy()
    return {'path': committed.path, 'made': made, 'left': left}


def download(server: Any, url: str, folder: Path) -> Path:
    """The newest save under a URL."""
    from tests.helpers.stored_saves import download_newest
    from xhf_hooks.places.objects import open_store

    return download_newest(open_store(url, server.backend_args), folder)


@pytest.fixture(scope='module', autouse=True)
def credentials():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope='module')
def saved(tmp_path_factory, credentials):
    """By server: it, the folder of its cases, and what they gave."""
    found = {}
    with ExitStack() as stack:
        for name, cases in CASES_OF.items():
            root = tmp_path_factory.mktemp(name)
            prefixes = [f'läufe/{case}/hf_model_iter_7' for case in cases]
            server = stack.enter_context(s3_server(name, root, prefixes=prefixes))
            scenarios = {case: partial(save_to_both, case, server, root) for case in cases}
            found[name] = server, root, run_scenarios(scenarios, N_RANKS, env=CREDENTIALS)
        yield found


def of_case(saved: Any, name: str, case: str) -> tuple[Any, Path, list[Any]]:
    server, root, results = saved[name]
    return server, root / case, check(results, case)


def each_case(only: Collection[str] = CASES) -> Any:
    pairs = [(server, case) for server, cases in CASES_OF.items() for case in cases if case in only]
    return pytest.mark.parametrize(('name', 'case'), pairs)


@each_case()
def test_the_same_files_as_in_a_folder(saved, name, case):
    from xhf_hooks.integrity.check import check_folder
    from xhf_hooks.integrity.manifest import MANIFEST_NAME, read_manifest

    server, root, ranks = of_case(saved, name, case)
    url = f's3://{BUCKET}/läufe/{case}'
    assert {rank['path'] for rank in ranks} == {f'{url}/hf_model_iter_7'}
    found = download(server, url, root / 'downloaded')
    for path in (root / 'local').rglob('*'):
        if path.is_file() and path.name != MANIFEST_NAME:
            assert (found / path.relative_to(root / 'local')).read_bytes() == path.read_bytes()
    names = [{p.relative_to(f).as_posix() for p in f.rglob('*') if p.is_file()} for f in (found, root / 'local')]
    assert names[0] == names[1]
    check_folder(found, read_manifest(found))
    assert_same_folder_tensors(found, root / 'local')


@each_case()
def test_each_file_is_sent_once_by_one_rank(saved, name, case):
    _, root, ranks = of_case(saved, name, case)
    made = [name for rank in ranks for name in rank['made']]
    weights = sorted(path.relative_to(root / 'local').as_posix() for path in (root / 'local').rglob('*.safetensors'))
    assert sorted(made) == weights
    assert not any(rank['left'] for rank in ranks)
    writers = [rank for rank in ranks if rank['made']]
    assert len(writers) == (N_RANKS if CASES[case][2] else min(len(weights), 1 if case != 'both' else N_RANKS))


# Runs of the hook, and what goes wrong

#: MMEngine reads its own checkpoints with torch.load, which by default refuses them.
ENV = {**CREDENTIALS, 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '1'}
BUCKET_NBYTES = 16 * 10**6


def url_of(case: str) -> str:
    return f's3://{BUCKET}/runs/{case}'


def in_store(server: Any, case: str) -> dict[str, Any]:
    """The prefixes, and the steps that pointers name."""
    from xhf_hooks.places.objects import open_store
    from xhf_hooks.places.store import read_pointer

    store = open_store(url_of(case), server.backend_args)
    keys = [path.removeprefix(f'{store._root}/') for path in store._fs.find(store._root)]
    pointers = [key.removesuffix('.json') for key in keys if key.endswith('.json') and '/' not in key]
    found = {name: read_pointer(store, name) for name in pointers}
    return {
        'prefixes': sorted({key.partition('/')[0] for key in keys if '/' in key}),
        'pointers': {name: pointer.step['number'] for name, pointer in found.items() if pointer.newest},
    }


def run_hook(case: str, server: Any, root: Path, *runs: dict[str, Any], **hook: Any) -> dict[str, Any]:
    """Runs of the hook into one store; what is there at last. Runs on: all ranks."""
    from tests.helpers.toy_run import run_config, train

    hook = dict(out_dir=url_of(case), backend_args=server.backend_args, **SMALL, **hook)
    logs = [train(run_config(root / case, hook=hook, stage=3, **run)).log_dir for run in runs]
    text = ''.join(path.read_text() for log in logs for path in Path(log).glob('*.log'))
    local = [str(path) for path in (root / case).rglob('*hf_model*')]
    return {**in_store(server, case), 'log': text, 'local': local}


def run_with_commands(server: Any, root: Path, last: int) -> tuple[str, list[str]]:
    """A run that keeps one save, and a program that reads each; the run's folder and what is there at last."""
    import torch.distributed as dist

    from tests.helpers.toy_run import run_config, train

    endpoint = f'AWS_ENDPOINT_URL={server.backend_args["endpoint_url"]}'
    program = [sys.executable, on_stored_program.__file__, '{path}', '{output}', '{step}', str(last)]
    hook = dict(out_dir=url_of('on saved'), backend_args=server.backend_args, interval=1, async_save=True, **SMALL)
    hook['on_saved'] = ['env', endpoint, *program]
    log_dir = train(run_config(root / 'on saved', hook=hook, stage=3, max_iters=last)).log_dir
    dist.barrier()  # rank 0 releases the place last
    return log_dir, in_store(server, 'on saved')['prefixes']


def refusal(case: str, server: Any, **options: Any) -> str:
    """What is said before any weight is read. Runs on: all ranks."""
    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks import save_hf
    from xhf_hooks.errors import XhfError

    options = {'out_dir': url_of(case), 'backend_args': server.backend_args, **options}
    try:
        save_hf(odd_llama(), **options)
    except XhfError as error:
        return str(error)
    return 'nothing was refused'


def failing_once(server: Any, root: Path) -> dict[str, Any]:
    """Rank 1 cannot send in the second of three saves. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks.errors import StoreError
    from xhf_hooks.places import store as stored

    send = stored.send_file

    def fail(store: Any, prefix: str, *args: Any, **more: Any) -> None:
        if dist.get_rank() == 1 and 'iter_2' in prefix:
            raise StoreError('SlowDown')
        send(store, prefix, *args, **more)

    with mock.patch.object(stored, 'send_file', fail):
        return run_hook('failing', server, root, dict(max_iters=3), interval=1, max_keep_ckpts=-1)


def through(proxy_port: int, case: str, root: Path, *iters: int) -> list[str]:
    """Saves of each of these iterations through a proxy; what was said of each. Runs on: all ranks."""
    from tests.helpers.zoo.llamas import odd_llama
    from xhf_hooks import save_hf
    from xhf_hooks.errors import XhfError

    engine = zero_engine(odd_llama(bf16=True), 3)
    args, said = {'endpoint_url': f'http://127.0.0.1:{proxy_port}'}, []
    for number in iters:
        try:
            said += save_hf(engine, url_of(case), backend_args=args, step=number, **SMALL).warnings[1:]
        except XhfError as error:
            said.append(str(error))
    save_hf(engine, root / case / 'local', **SMALL)
    engine.destroy()
    return said


def fails(method: str, path: str) -> Any:
    """What the proxy does: each request of one case fails once; in another one a save is denied."""
    if '/denied/' in path and 'iter_2' in path and method == 'PUT' and 'model-' in path:
        return 403
    return each_in_turn(method, path)


each_in_turn = EachInTurn(lambda method, path: '/faulty/' in path, (500, 503, 'cut', 'lose'))


def memory(server: Any) -> dict[str, int]:
    """What a save takes on this rank. Runs on: all ranks."""
    import torch

    from tests.helpers.zoo.llamas import larger_llama
    from xhf_hooks import save_hf

    engine = zero_engine(larger_llama().to(torch.bfloat16), 3)
    how = dict(backend_args=server.backend_args, bucket_size=BUCKET_NBYTES, max_shard_size='24MB')
    save_hf(engine, url_of('memory'), **how)  # what the first save brings with it
    with PeakSampler() as sampler:
        committed = save_hf(engine, url_of('memory'), **how)
    engine.destroy()
    return {'memory': sampler.meter.peak_extra_nbytes, 'weights': committed.cost.nbytes}


@pytest.fixture(scope='module')
def ran(tmp_path_factory, credentials):
    root = tmp_path_factory.mktemp('runs')
    with s3_server('moto', root) as server, faulty_proxy(server.port) as proxy:
        proxy.decide = fails
        best = dict(save_best='acc', interval=-1)
        scenarios = {
            'kept': partial(
                run_hook, 'kept', server, root, dict(max_iters=3), interval=1, max_keep_ckpts=2, async_save=True
            ),
            'best': partial(
                run_hook, 'best', server, root, dict(max_iters=4, scores=[0.2, 0.9]), dict(scores=[0.5, 0.6]), **best
            ),
            'again': partial(run_hook, 'again', server, root, dict(max_iters=2), dict(max_iters=2), interval=1),
            'failing': partial(failing_once, server, root),
            'on saved': partial(run_with_commands, server, root, 6),
            'memory': partial(memory, server),
            'faulty': partial(through, proxy.port, 'faulty', root, 1, 2),
            'denied': partial(through, proxy.port, 'denied', root, 1, 2),
            'no bucket': partial(refusal, 'no bucket', server, out_dir='s3://nobody-has-this/run'),
            'writer': partial(refusal, 'writer', server, writer='positional'),
        }
        yield server, run_scenarios(scenarios, 2, env=ENV), root


@pytest.mark.parametrize(
    ('case', 'prefixes', 'pointers'),
    [
        ('kept', ['hf_model_iter_2', 'hf_model_iter_3'], {'hf_model': 3}),
        ('best', ['hf_model_best_iter_4', 'hf_model_iter_4_2'], {'hf_model': 4, 'hf_model_best': 4}),
        ('again', ['hf_model_iter_2_2'], {'hf_model': 2}),
        ('failing', ['hf_model_iter_1', 'hf_model_iter_3'], {'hf_model': 3}),
    ],
)
def test_what_runs_leave(ran, case, prefixes, pointers):
    for found in check(ran[1], case):
        assert (found['prefixes'], found['pointers']) == (prefixes, pointers)
        assert found['local'] == []


def test_a_command_reads_the_save_in_the_store(ran):
    """Also after a later save has replaced it: it is deleted when the command has ended."""
    log_dir, prefixes = check(ran[1], 'on saved')[0]
    found = scalars(Path(log_dir))
    assert len(found) >= 2 and max(found) == 6, found
    for step, numbers in found.items():
        expected = {'is_listed': 1, 'is_newest': step == 6, 'verified': 1}
        assert numbers == {'step': step, **expected}
        assert f'on_saved for hf_model, iter_{step} took' in log_text(Path(log_dir))
        assert (Path(log_dir) / 'hf_model_on_saved' / f'iter_{step}' / 'output.log').is_file()
    assert prefixes == ['hf_model_iter_6']


def test_the_best_of_an_earlier_run_stays(ran):
    log = check(ran[1], 'best')[0]['log']
    assert 'best acc so far: 0.9000' in log


def test_a_save_that_fails_leaves_the_one_before(ran):
    log = check(ran[1], 'failing')[0]['log']
    words = ('the save of iter_2 failed and training goes on', 'rank 1: ', 'SlowDown')
    assert all(each in log for each in words), log


def test_requests_that_fail_once_are_repeated(ran):
    server, results, root = ran
    assert check(results, 'faulty') == [[], []]
    found = download(server, url_of('faulty'), root / 'faulty')
    assert found.name == 'hf_model_iter_2'
    assert_same_folder_tensors(found, root / 'faulty' / 'local')


def test_what_the_store_denies_is_told_and_changes_nothing(ran):
    server, results, root = ran
    for said in check(results, 'denied'):
        assert len(said) == 1 and 'hf_model_iter_2/model-' in said[0] and 'backend_args' in said[0], said
    found = in_store(server, 'denied')
    assert (found['prefixes'], found['pointers']) == (['hf_model_iter_1'], {'hf_model': 1})
    assert_same_folder_tensors(download(server, url_of('denied'), root / 'denied'), root / 'denied' / 'local')


def test_memory_is_that_of_the_sending_and_the_parts(ran):
    from xhf_hooks.places.objects import _S3_PART_NBYTES, _S3_PARTS

    for rank in check(ran[1], 'memory'):
        assert rank['weights'] > 2.5 * BUCKET_NBYTES
        assert rank['memory'] < 3 * BUCKET_NBYTES + _S3_PARTS * _S3_PART_NBYTES, rank


@pytest.mark.parametrize(
    ('case', 'words'),
    [
        ('no bucket', ['s3://nobody-has-this/run', 'Check out_dir']),
        ('writer', ["option writer: expected 'auto', 'parallel', 'stream' or 'gather' when out_dir is a URL"]),
    ],
)
def test_refused(ran, case, words):
    for said in check(ran[1], case):
        assert all(word in said for word in words), said
