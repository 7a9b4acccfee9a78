"""The model as its folder says: family, config.json, formats, tensors, tokenizer; sizes and names of adapters."""
