"""Show the demo's results and fail unless they are good: the last step of tools/demo.sh.

    python tools/demo/check.py work_dirs/demo

Loads the newest `hf_model` with nothing but transformers, generates text, and prints the folder's
files and the loss. Exit status 1: no save, or the loss has not fallen enough.
"""

import argparse
import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = 'def __init__(self'
NEW_TOKENS = 60
LEAST_FALL = 0.2  # of the first logged loss


def newest_save(work_dir: Path) -> Path:
    """Return `hf_model` of the newest run in `work_dir`."""
    # Runs are named by timestamps, so they sort by time
    saves = sorted(work_dir.glob('*/hf_model'))
    if not saves:
        sys.exit(f'No save found; expected {work_dir}/<timestamp>/hf_model')
    return saves[-1]


def generate(folder: Path) -> str:
    """Load the folder and return the prompt with the model's continuation, without sampling."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors='pt')
    output = model.generate(
        input_ids=inputs['input_ids'],
        attention_mask=inputs['attention_mask'],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return tokenizer.decode(output[0], skip_special_tokens=True)


def main() -> None:
    """Print everything; exit with status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="Show the demo's results and check them.")
    parser.add_argument('work_dir', type=Path, help='work_dir of the demo')
    folder = newest_save(parser.parse_args().work_dir)
    lines = (folder.parent / 'vis_data' / 'scalars.json').read_text().splitlines()
    losses = [found['loss'] for line in lines if 'loss' in (found := json.loads(line))]
    fall = 1 - losses[-1] / losses[0]
    text = generate(folder)

    print(f'{folder}: {", ".join(sorted(path.name for path in folder.iterdir()))}')
    print('What the model writes:')
    print('    ' + text.replace('\n', '\n    '))
    print(f'Loss: {losses[0]:.2f} -> {losses[-1]:.2f}, {fall:.0%} down')
    if fall < LEAST_FALL:
        sys.exit(f'The loss has fallen by {fall:.0%}; expected at least {LEAST_FALL:.0%}')


if __name__ == '__main__':
    main()
