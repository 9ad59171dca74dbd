"""Check that a model folder is complete and unchanged, or compare two models. Same as the command xhf-verify."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from xhf_hooks.offline.commands.verify import main

if __name__ == '__main__':
    sys.exit(main())
