"""Show a run's output in short: the second half of a pipe.

    torchrun ... tools/train.py CONFIG | python tools/demo/show.py

Left out are MMEngine's reports of the environment, the config and the list of hooks, where it saves, and two warnings
about its own code. All of this is in its log file. A line of training becomes a bar as long as its loss. Everything
else is shown, and so is the error output, which does not pass through here.
"""

import re
import sys
from collections.abc import Iterable, Iterator

RECORD = re.compile(r'\d\d/\d\d [\d:]{8} - mmengine - ([A-Z]+) - (.*)')
ITERATION = re.compile(r'Iter\(train\) \[ *(\d+)/(\d+)\].* loss: ([\d.]+)')
COLOR = re.compile(r'\x1b\[[\d;]*m')
#: How reports of many lines begin. That of the environment begins with an empty line.
REPORT = re.compile(r'INFO - ($|Config:|Hooks will be executed)')
#: How records of one line begin, after which other lines are shown.
LINE = re.compile(
    'INFO - (Checkpoints will be saved to|Saving checkpoint at)'
    '|WARNING - ("FileClient" will be deprecated|"HardDiskBackend" is the alias of)'
)
#: What DeepSpeed prints once for each process.
BUILT = re.compile(r'DeepSpeed deepspeed\.ops\.\S+ built successfully')
#: A sign of a bar for so much loss, and at most so many.
LOSS_OF_A_SIGN, WIDTH = 0.1, 60


def shorten(lines: Iterable[str]) -> Iterator[str]:
    """Yield what is shown of the lines of a log, which end without a newline."""
    is_report = False
    for line in lines:
        line = COLOR.sub('', line)
        record = RECORD.match(line)
        if record is None:
            if not is_report and not BUILT.match(line):
                yield line
            continue
        level, text = record.groups()
        is_report = REPORT.match(f'{level} - {text}') is not None
        iteration = ITERATION.match(text)
        if iteration and level == 'INFO':
            done, of, loss = int(iteration[1]), int(iteration[2]), float(iteration[3])
            bar = '#' * max(1, min(WIDTH, round(loss / LOSS_OF_A_SIGN)))
            yield f'    iteration {done:3} of {of}   loss {loss:.2f}  {bar}'
        elif not is_report and not LINE.match(f'{level} - {text}'):
            yield text if level == 'INFO' else f'{level}: {text}'


if __name__ == '__main__':
    for shown in shorten(line.rstrip('\n') for line in sys.stdin):
        print(shown, flush=True)
