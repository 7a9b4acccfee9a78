"""The model as its folder says: family, config.json, formats, tensors, tokenizer, names of adapters."""
