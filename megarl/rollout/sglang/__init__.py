"""An SGLang engine: its arguments, its processes, and what of SGLang is corrected on the way."""
