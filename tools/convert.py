"""Convert the checkpoint of a finished run into a Hugging Face folder. Same as the command xhf-convert."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from xhf_hooks.offline.commands.convert import main

if __name__ == '__main__':
    sys.exit(main())
