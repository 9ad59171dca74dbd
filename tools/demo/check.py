"""Show the demo's results and fail unless they are good: the last step of tools/demo.sh.

    python tools/demo/check.py work_dirs/demo

Loads the newest `hf_model` with nothing but transformers, generates text, and prints the folder, the
loss and the cost of each save. Exit status 1: no save, or the loss has not fallen enough.
"""

import argparse
import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = 'def __init__(self'
NEW_TOKENS = 60
LEAST_FALL = 0.30  # of the first logged loss


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


def print_tree(folder: Path) -> None:
    """Print the folder's files with their sizes."""
    print(f'{folder}/')
    for path in sorted(folder.rglob('*')):
        if path.is_file():
            print(f'    {path.relative_to(folder)!s:<32}{path.stat().st_size:>12,} bytes')


def read_scalars(run_dir: Path) -> list[dict[str, float]]:
    """Return the lines of the run's scalars, in the order in which they were logged."""
    lines = (run_dir / 'vis_data' / 'scalars.json').read_text().splitlines()
    return [json.loads(line) for line in lines]


def print_costs(scalars: list[dict[str, float]]) -> None:
    """Print what each save cost, as the hook logged it."""
    costs = [line for line in scalars if 'hf_checkpoint/seconds' in line]
    if not costs:
        print('    not logged')
    for line in costs:
        print(
            f'    iteration {line["step"]:>4}: {line["hf_checkpoint/seconds"]:.2f} s, '
            f'{line["hf_checkpoint/nbytes"] / 1e6:.1f} MB written, '
            f'{line["hf_checkpoint/peak_extra_mb"]:.0f} MB of extra memory'
        )


def main() -> None:
    """Print everything; exit with status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="Show the demo's results and check them.")
    parser.add_argument('work_dir', type=Path, help='work_dir of the demo')
    folder = newest_save(parser.parse_args().work_dir)
    scalars = read_scalars(folder.parent)
    losses = [line['loss'] for line in scalars if 'loss' in line]
    fall = 1 - losses[-1] / losses[0]
    text = generate(folder)

    print_tree(folder)
    print('What the saves cost:')
    print_costs(scalars)
    print('What the model writes:')
    print('    ' + text.replace('\n', '\n    '))
    print(f'Loss: {losses[0]:.2f} -> {losses[-1]:.2f}, {fall:.0%} down')
    if fall < LEAST_FALL:
        sys.exit(f'The loss has fallen by {fall:.0%}; expected at least {LEAST_FALL:.0%}')


if __name__ == '__main__':
    main()
