"""Files of a save that come from the base: which tokenizer and processor, how they are written, who reads them."""
