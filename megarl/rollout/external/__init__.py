"""SGLang servers that others have started, in place of a run's own engines: asked over HTTP, filled by files."""
