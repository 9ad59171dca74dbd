"""Every built-in config of XTuner: the exporter that is chosen for it, what goes out, and its chat template."""

from __future__ import annotations

import re

import pytest

from tests.e2e.xtuner_stack.builtin_configs import BuiltIn, built_ins, table
from tests.helpers.ranks.launch import REPO_ROOT


@pytest.fixture(scope='module')
def configs() -> list[BuiltIn]:
    return built_ins()


@pytest.fixture(scope='module')
def exported(configs) -> list[BuiltIn]:
    """But for those that transformers.Trainer trains, and InternVL with 4 bits."""
    return [config for config in configs if not config.exporter.startswith('none: ')]


def test_the_table_is_the_one_in_docs(configs):
    """Which exporter each model of XTuner has."""
    assert len(configs) == 587
    refused = [c.name for c in configs if c.found and c.exporter.startswith('none: ')]
    assert len(refused) == 7 and all(name.startswith('internvl/') and '_qlora_' in name for name in refused)
    assert (REPO_ROOT / 'docs' / 'xtuner_configs.md').read_text() == table(configs)


def test_everything_trained_goes_out(exported):
    lost = {c.name: sorted(c.found.trained - c.found.reads)[:3] for c in exported}
    assert {name: tensors for name, tensors in lost.items() if tensors} == {}


def test_an_adapter_goes_out_alone(exported):
    assert [c.name for c in exported if c.exporter == 'LoraExporter' and c.found.reads != c.found.trained] == []


def test_the_reference_model_stays_here_and_the_reward_head_goes_out(exported):
    dpo = [c.found.reads for c in exported if c.found.model == 'DPO']
    assert len(dpo) == 8 and not any(name.startswith('ref_llm.') for reads in dpo for name in reads)
    reward = [c.found.reads for c in exported if c.name.startswith('reward_model/')]
    assert len(reward) == 7 and all('v_head.weight' in reads for reads in reward)


def test_the_prompt_template_is_found(configs):
    """The one that its text names. Preference pairs, rewards and InternVL do not go through a prompt template."""
    from xtuner.utils import PROMPT_TEMPLATE

    wrong = {}
    for config in configs:
        named = re.search(r'^prompt_template = PROMPT_TEMPLATE\.(\w+)$', config.text, flags=re.MULTILINE)
        own_format = 'type=build_preference_dataset' in config.text or config.name.startswith('internvl/')
        expected = None if named is None or own_format else PROMPT_TEMPLATE[named[1]]
        if config.template != expected:
            wrong[config.name] = (config.template, named and named[1])
    assert wrong == {}
