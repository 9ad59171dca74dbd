"""What the installed peft can do, found by trying."""

import tempfile
from functools import cache
from importlib.util import find_spec

import peft
from transformers import AutoModelForCausalLM

from tests.helpers.models.adapted import adapt, can_be_made
from tests.helpers.models.model_folder import resize_embeddings
from tests.helpers.models.zoo import build


@cache
def saves_resized_embeddings() -> bool:
    """Whether the installed peft saves the embeddings if they have not the size of a base in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        build('llama').save_pretrained(folder)
        base = AutoModelForCausalLM.from_pretrained(folder)
        resize_embeddings(base, 137)
        return any('embed_tokens' in name for name in peft.get_peft_model_state_dict(adapt(base)))


#: Inits that the installed peft has.
INITS = [
    *(init for init in ('pissa', 'olora', 'gaussian', 'pissa_niter_2') if can_be_made('llama', init_lora_weights=init)),
    *['lora_ga'] * (find_spec('peft.tuners.lora.loraga') is not None),
]
