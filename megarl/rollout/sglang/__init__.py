"""An SGLang engine: its arguments, its processes, and patches of SGLang."""
