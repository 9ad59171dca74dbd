"""A program that another environment runs on what runs of XTuner left.

    python tests/e2e/xtuner_stack/elsewhere.py OUT WORK_DIR...

It converts the last checkpoint of each to OUT/NAME, and reads the hook's folder: OUT/logits.pt has the logits by NAME.
"""

import sys
from pathlib import Path

IDS = list(range(3, 23))


def logits_of(folder: Path):
    """Of the model in float32, which must load with nothing to report."""
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, torch_dtype=torch.float32)
    assert not any(report.values()), (folder, report)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([IDS])).logits


def main(out: Path, *work_dirs: Path) -> None:
    import torch

    from xhf_hooks.offline.commands.convert import main as convert

    logits = {}
    for work_dir in work_dirs:
        assert convert([str(work_dir), str(out / work_dir.name)]) == 0
        (folder,) = work_dir.glob('*/hf_model')
        if (folder / 'config.json').exists():
            logits[work_dir.name] = logits_of(folder)
    torch.save(logits, out / 'logits.pt')


if __name__ == '__main__':
    main(*map(Path, sys.argv[1:]))
