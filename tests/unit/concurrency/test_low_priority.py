"""Threads of a save beside training give way to it; nothing else does."""

from __future__ import annotations

import os
import threading
from unittest import mock

import pytest

from xhf_hooks.threads import lower_priority
from xhf_hooks.writers.writer import Writer


def nice_value(thread: int | None = None) -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id() if thread is None else thread)


def in_a_thread(work):
    """What it returns."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_of_a_thread_and_of_those_that_it_starts_alone():
    before = nice_value()

    def lowered():
        lower_priority()
        return nice_value(), in_a_thread(nice_value)

    own, child = in_a_thread(lowered)
    assert before < own == child
    assert in_a_thread(nice_value) == nice_value() == before


@pytest.mark.parametrize('beside_training', [False, True])
def test_a_writer_gives_way_beside_training_alone(beside_training):
    lowered = threading.Event()
    with mock.patch('xhf_hooks.writers.writer.lower_priority', lambda: (lower_priority(), lowered.set())):
        writer = Writer(pending_nbytes=1, beside_training=beside_training)
        assert not beside_training or lowered.wait(60)
        found = nice_value(writer._thread.native_id)
        writer.abort()
    assert (found > nice_value()) == beside_training
