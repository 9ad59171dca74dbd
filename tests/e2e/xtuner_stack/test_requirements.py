"""XTuner 0.2.0 is installed without what it requires; all of that is there, bitsandbytes in a newer version."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version


def test_bitsandbytes_alone_is_newer_than_xtuner_wants():
    checked = subprocess.run([sys.executable, '-m', 'pip', 'check'], capture_output=True, text=True).stdout
    found = version('bitsandbytes')
    assert checked.splitlines() == [
        f'xtuner 0.2.0 has requirement bitsandbytes==0.45.0, but you have bitsandbytes {found}.'
    ]


def test_what_peft_and_transformers_import_of_it_is_there():
    """With triton beside it, as torch's CUDA build has it, 0.45.0 dies here."""
    import bitsandbytes.nn
    import peft.tuners.lora.bnb
    import transformers.integrations.bitsandbytes

    assert peft.tuners.lora.bnb.is_bnb_4bit_available()
    assert hasattr(bitsandbytes.nn, 'Linear4bit')
    assert transformers.integrations.bitsandbytes.validate_bnb_backend_availability(raise_exception=True)
