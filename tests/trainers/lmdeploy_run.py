"""LMDeploy's own converter on a folder: python lmdeploy_run.py FOLDER OUT.

What follows it, TurboMind, needs a GPU; the converter computes on the device that torch names. Its compiled part is
imported, but not called when the result goes to files.
"""

import sys
from unittest import mock

import torch

if not torch.cuda.is_available():
    sys.modules['_turbomind'] = mock.MagicMock()

from lmdeploy.turbomind.deploy import converter

if __name__ == '__main__':
    if not torch.cuda.is_available():
        converter.is_bf16_supported = lambda *_: True
        torch.Tensor.cuda = lambda self, *_, **__: self
    converter.main('llama3', sys.argv[1], dst_path=sys.argv[2])
