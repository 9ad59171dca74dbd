"""Same weights, same bytes, whichever transformers: every family that 4.48 and the current one both know.

XTuner's stack made tests/data/both_stacks.json (see tests/helpers/same_weights.py); both stacks must reproduce it.
The base is one that 4.48 has written. Of a model that it builds itself, transformers 5 names CLIP's tower in LLaVA
``vision_tower.``, without ``vision_model.``; a save, like save_pretrained, keeps the names of the base.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from tests.helpers.same_weights import exported_sha256
from tests.helpers.zoo import FAMILIES, available

EXPECTED = json.loads((Path(__file__).parents[1] / 'data' / 'both_stacks.json').read_text())


@pytest.mark.parametrize('family', EXPECTED)
def test_the_file_is_the_same_in_both_stacks(family, tmp_path):
    assert exported_sha256(family, EXPECTED[family]['base'], tmp_path) == EXPECTED[family]['sha256']


def test_these_are_the_families_that_both_know():
    known = {family for family in FAMILIES if available(family)}
    assert set(EXPECTED) <= known
    assert transformers.__version__ != '4.48.0' or set(EXPECTED) == known
