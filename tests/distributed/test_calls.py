"""save_hf again and again: what does not change is not made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.assert_intact import assert_whole
from tests.helpers.ranks import run_ranks
from tests.helpers.zoo.llamas import llama


def call_again(root: Path) -> dict[str, Any]:
    """Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks import save_hf
    from xhf_hooks.exporters import huggingface

    model, found = llama(), {}
    new_group, build = dist.new_group, huggingface.build_on_meta
    with (
        mock.patch.object(dist, 'new_group', side_effect=new_group) as made,
        mock.patch.object(huggingface, 'build_on_meta', side_effect=build) as built,
    ):

        def call(what: str) -> None:
            save_hf(model, root / 'hf_model')
            found[what] = (made.call_count, built.call_count)

        call('first')
        call('second')
        model.config.initializer_range = 0.5  # whatever is written there must be what is compared
        call('config changed')
        model.resize_token_embeddings(70)
        call('resized')
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()  # as a notebook does between two runs
        dist.init_process_group('gloo', init_method=f'file://{root}/store', rank=rank, world_size=world_size)
        call('another process group')
    written = json.loads((root / 'hf_model' / 'config.json').read_text())
    found['written'] = (written['initializer_range'], written['vocab_size'])
    return found


def interrupt_rank_0(root: Path) -> list[str]:
    """Ctrl-C on rank 0 while the others wait for it; then they call again. Runs on: all ranks."""
    from xhf_hooks import manager, save_hf

    model, outcomes = llama(), []
    with mock.patch.object(manager, 'find_tokenizer', side_effect=KeyboardInterrupt):  # rank 0 alone looks for it
        try:
            save_hf(model, root / 'hf_model')
        except BaseException as error:
            outcomes.append(type(error).__name__)
    save_hf(model, root / 'hf_model')
    return outcomes


def test_an_interrupted_call_is_told_to_the_others_and_the_next_one_works(tmp_path):
    assert run_ranks(interrupt_rank_0, 2, tmp_path, init='torch') == [['KeyboardInterrupt'], ['RankLostError']]
    assert_whole(tmp_path / 'hf_model')


def test_groups_and_models_are_kept(tmp_path):
    for found in run_ranks(call_again, 2, tmp_path, init='torch'):
        assert found['first'] == found['second'] == (1, 1)
        assert found['config changed'] == (1, 2)
        assert found['resized'] == (1, 3)
        assert found['another process group'] == (2, 3)
        assert found['written'] == (0.5, 70)
    assert_whole(tmp_path / 'hf_model')
