"""The demo's training, killed in the middle of its second save: the first start of `bash tools/demo.sh --kill`.

The second start is demo_zero3.py with `--resume`.
"""

_base_ = 'demo_zero3.py'

# 'demo.kill' (tools/demo/kill.py) kills the process
custom_imports = dict(imports=['xhf_hooks', 'demo.task', 'demo.kill'])
