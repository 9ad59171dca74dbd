"""What the log says of a run's saves."""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.models.zoo.llamas import llama
from xhf_hooks import save_hf
from xhf_hooks.errors import AgreedError, RankLostError
from xhf_hooks.options import RunOptions
from xhf_hooks.places import sibling_folders
from xhf_hooks.planning.types import CommittedCheckpoint, SaveCost, Step
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.runs import kept_plan, run
from xhf_hooks.runs.preflight import log_preparations
from xhf_hooks.runs.telemetry import Progress, RunLog, log_save, show


@pytest.fixture()
def log(caplog):
    caplog.set_level(logging.INFO)
    return RunLog(logging.getLogger('test_report'), 'Door')


def test_a_long_save_tells_its_progress(log, caplog, monkeypatch):
    monkeypatch.setattr(Progress, 'interval_secs', 0.0)
    progress = Progress(log, 'iter_500', 3_000_000_000)
    for _ in range(2):
        progress.wrote(500_000_000)
    assert caplog.messages[-1] == 'Door: saving iter_500, 1.00 of 3.00 GB'
    monkeypatch.setattr(Progress, 'interval_secs', 60.0)
    progress.wrote(1)
    assert len(caplog.messages) == 2


def test_lines_are_visible_without_set_up(capsys, monkeypatch):
    """On stderr, until the root logger has a handler; what a user has set stays."""
    monkeypatch.setattr(logging.root, 'handlers', [])
    logger = logging.getLogger('test_nobody_has_set_it_up')
    for _ in range(2):
        show(logger)
    RunLog(logger, 'Door').info('one')
    logging.root.addHandler(logging.StreamHandler(sys.stdout))
    RunLog(logger, 'Door').info('two')
    assert capsys.readouterr() == ('Door: two\n', 'Door: one\n')
    chosen = logging.getLogger('test_chosen')
    chosen.setLevel(logging.ERROR)
    show(chosen)
    assert chosen.level == logging.ERROR


def test_a_child_is_not_forked_in_the_middle_of_a_line(log):
    """As DataLoader's workers are. The stream would be locked in the child, by a thread that it does not have."""
    begun, written, handler = threading.Event(), [], logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        begun.set()
        time.sleep(0.2)
        written.append(record)

    handler.emit = emit
    log.logger.addHandler(handler)
    thread = threading.Thread(target=log.info, args=('from a thread',))
    thread.start()
    begun.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)
        log.info('from the child')
        os._exit(len(written))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    thread.join()
    log.logger.removeHandler(handler)


@pytest.mark.parametrize(
    ('strategy', 'world_size', 'is_told'),
    [(WriteStrategy.POSITIONAL, 2, True), (WriteStrategy.GATHER, 2, False), (WriteStrategy.POSITIONAL, 1, False)],
)
def test_what_is_gathered_is_named_before_training(strategy, world_size, is_told, log, caplog):
    """Unless all is, as the option writer asks for, or nothing, as in one process."""
    group = SimpleNamespace(reads=[SimpleNamespace(name='lm_head.weight')])
    placements = [SimpleNamespace(file='model.safetensors')] * 2
    plan = SimpleNamespace(placements=placements, files=[1], nbytes=8, gathered=[group, group], copied=())
    exporter, export = SimpleNamespace(notes=()), SimpleNamespace(adapter_base_tensors=())
    preparation = SimpleNamespace(exporter=exporter, export=export, left_out=(), expected_extra_nbytes=0)
    ranks, unwrapped = SimpleNamespace(world_size=world_size), SimpleNamespace(model=None)
    saves = dict(source=None, plan=plan, preparation=preparation, strategy=strategy, background=None)
    context = SimpleNamespace(log=log, collective=ranks, unwrapped=unwrapped, **saves)
    log_preparations(context, [SimpleNamespace(path='out')], ['now'])
    expected = ['Door: gathered, not saved in slices: 1 tensor (lm_head.weight)'] if is_told else []
    assert caplog.messages[1:] == expected


def test_a_warning_about_all_saves_is_logged_once(log, caplog):
    """The trial before training gives it, and each save again; what only a save finds is logged each time."""
    cost = SaveCost(1, 1.0, 1.0, 1)
    log.warn_once('no tokenizer')
    for number in (1, 2):
        found = CommittedCheckpoint(
            Path('hf_model'), 'hf_model', Step('iter', number, number), cost, ('no tokenizer', 'NaN')
        )
        log_save(log, found)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert warnings == ['Door: no tokenizer', 'Door: NaN', 'Door: NaN']


def test_warnings_that_alternate_are_logged_once_each(log, caplog):
    """As where layers are frozen and trained again in turn, so that other tensors are left out at each save."""
    for message in ('not saved: a', 'not saved: b') * 3:
        log.warn_once(message)
    assert caplog.messages == ['Door: not saved: a', 'Door: not saved: b']


def test_an_error_that_all_ranks_share_is_logged_once(log, caplog):
    """By rank 0, also if the save is tried again; each rank says which contact it has lost."""
    for rank in (0, 1):
        collective = SimpleNamespace(rank=rank)
        saves = run.Run(
            SimpleNamespace(log=log, collective=collective), None, {}, RunOptions(), None, None, print, print
        )
        for error in (AgreedError('save', {0: 'full'}), AgreedError('save', {0: 'full'}), RankLostError('gone')):
            saves.raise_or_log(error, 'the save of iter_4')
    told = [message.split(': ')[1] for message in caplog.messages]
    assert told == ['the save of iter_4 failed and training goes on'] * 3
    assert [('gone' in message) for message in caplog.messages] == [False, True, True]


def test_the_cost_of_a_call_is_that_of_the_whole_call(tmp_path, caplog, monkeypatch):
    """What comes before the save, and the deletion of the save that it replaces."""
    caplog.set_level(logging.INFO)
    chosen, deleted = kept_plan.choose_strategy, sibling_folders.remove_tree
    monkeypatch.setattr(kept_plan, 'choose_strategy', lambda *args: [time.sleep(0.3), chosen(*args)][1])
    monkeypatch.setattr(sibling_folders, 'remove_tree', lambda path: [time.sleep(0.3), deleted(path)][1])
    for _ in range(2):  # of two models
        cost = save_hf(llama(), tmp_path / 'hf_model').cost
    assert list(cost.stage_secs)[:2] == ['preflight', 'plan']
    assert cost.stage_secs['preflight'] > 0.3 and cost.stage_secs['commit'] > 0.3
    assert cost.seconds == pytest.approx(sum(cost.stage_secs.values()), abs=0.1)
    assert caplog.text.count('stages preflight ') == 2
