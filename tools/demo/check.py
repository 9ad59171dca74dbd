"""Show the demo's results, and fail unless they are good: the last step of tools/demo.sh.

    python tools/demo/check.py work_dirs/demo/<timestamp>

Loads `hf_model` with nothing but transformers, lets the model write, and says what was saved and what to type next.
Exit status 1: no save, or the loss has not fallen enough.
"""

import argparse
import json
import sys
from itertools import takewhile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

#: A class that the training text does not have; it has others with this base class.
PROMPT = """class Stack(Queue):

    def _init(self, maxsize):
"""
NEW_TOKENS = 56
MOST_LINES = 9
LEAST_FALL = 0.5  # of the first logged loss
NEXT = """\
== what to type next, in this environment (source tools/env.sh && use_env .venv) or your own (pip install .)
    xhf-verify {folder}
    xhf-convert CHECKPOINT OUT        a finished run's checkpoint as such a folder
    bash tools/demo.sh --kill         a run that is killed while it saves, and started again
    from xhf_hooks import HFCheckpointCallback        in a script with Trainer
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[HFCheckpointCallback()])
    trainer.train()
    from xhf_hooks import HFCheckpointHook            on top of a config of XTuner
    dict(type=HFCheckpointHook),                      in its custom_hooks"""


def write(folder: Path) -> str:
    """Load the folder and return the prompt with the model's continuation: lines of the class, whole ones."""
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors='pt')
    output = model.generate(
        input_ids=inputs['input_ids'],
        attention_mask=inputs['attention_mask'],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=4,
    )
    text = tokenizer.decode(output[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    first, *lines = text.splitlines()[:-1]
    of_class = takewhile(lambda line: line.startswith(' ') or not line, lines)
    return '\n'.join([first, *(line for line in of_class if line.strip())][:MOST_LINES])


def main() -> None:
    """Print everything; exit with status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="Show the demo's results and check them.")
    parser.add_argument('run', type=Path, help='folder of the run')
    run = parser.parse_args().run
    folder = run / 'hf_model'
    if not folder.is_dir():
        sys.exit(f'No save found; expected {folder}')
    scalars = [json.loads(line) for line in (run / 'vis_data' / 'scalars.json').read_text().splitlines()]
    losses = [found['loss'] for found in scalars if 'loss' in found]
    waits = [found['hf_checkpoint/stalled_seconds'] for found in scalars if 'hf_checkpoint/stalled_seconds' in found]
    fall = 1 - losses[-1] / losses[0]

    print('== what the last save writes after "class Stack(Queue):", a class that its text does not have')
    print('    ' + write(folder).replace('\n', '\n    '))
    print(f'== saved {folder}: {", ".join(sorted(path.name for path in folder.iterdir()))}')
    loss = f'{losses[0]:.2f} -> {losses[-1]:.2f}'
    print(f'    Training waited {sum(waits):.2f} s for {len(waits)} saves. Loss: {loss}. Log: {run / run.name}.log')
    if fall < LEAST_FALL:
        sys.exit(f'The loss has fallen by {fall:.0%}; expected at least {LEAST_FALL:.0%}')
    print(NEXT.format(folder=folder))


if __name__ == '__main__':
    main()
