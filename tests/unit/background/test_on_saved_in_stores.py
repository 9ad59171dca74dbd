"""Commands with ``out_dir='s3://...'``: they get the URL of the save, which stays until they have ended."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from tests.unit.background.test_on_saved import command  # noqa: F401
from tests.unit.places.test_store_folder import folder, newest, prefixes, save, url  # noqa: F401
from xhf_hooks.background.on_saved import AfterSaves
from xhf_hooks.planning.types import CommittedCheckpoint, SaveCost, Step
from xhf_hooks.telemetry import RunLog

pytestmark = pytest.mark.modern_only

SECS = 60.0


@pytest.fixture
def commit(folder):  # noqa: F811
    """Saves, and tells the runner of a command."""

    def one(after: AfterSaves, number: int) -> None:
        save(folder, number)
        step = Step('iter', number, number)
        committed = CommittedCheckpoint(folder.where, step, SaveCost(1, 1.0, 1.0, 1))
        after.committed(committed, folder)

    return one


@pytest.fixture
def make(tmp_path):
    made: list[AfterSaves] = []

    def one(words) -> AfterSaves:
        log = RunLog(logging.getLogger('on_saved'), 'test')
        made.append(AfterSaves(words, log, timeout_secs=SECS, run_dir=tmp_path / 'run'))
        return made[-1]

    yield one
    for after in made:
        after.close()


def test_a_save_stays_while_it_is_in_use(make, commit, command, folder, url):  # noqa: F811
    after = make(command.words)
    commit(after, 1)
    command.wait_for_calls(1)
    for number in (2, 3, 4, 5):
        commit(after, number)
    names = {f'hf_model_iter_{number}' for number in (1, 4, 5)}
    assert prefixes(url) == names and newest(url) == 'hf_model_iter_5', 'max_keep is 2, and 1 is in use'
    command.may_end()
    assert after.wait(SECS) and command.calls == [('hf_model_iter_1', 1), ('hf_model_iter_5', 5)]
    folder.release()
    assert prefixes(url) == {'hf_model_iter_4', 'hf_model_iter_5'}


def test_a_command_gets_the_url_and_a_local_folder(make, commit, url, tmp_path):  # noqa: F811
    script = (
        'import json, sys; open(sys.argv[3] + "/file", "w"); print(json.dumps({"same": sys.argv[1] == sys.argv[2]}))'
    )
    after = make((sys.executable, '-c', script, '{path}', f'{url}/hf_model_iter_5', '{output}'))
    commit(after, 5)
    assert after.wait(SECS)
    assert [result.scalars() for result in after.results()] == [{'on_saved/hf_model/same': 1.0}]
    output = tmp_path / 'run' / 'hf_model_on_saved' / 'iter_5'
    assert sorted(path.name for path in output.iterdir()) == ['file', 'output.log']
    assert json.loads((output / 'output.log').read_text()) == {'same': True}
