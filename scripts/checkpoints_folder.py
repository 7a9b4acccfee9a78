"""Print where a run's checkpoints lie: checkpoints_folder.py RECIPE [a.b=c ...] [options of `megarl train`]."""

import sys
from pathlib import Path

from megarl.config.loading import load_recipe

path, *keys = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
run = load_recipe(path, keys).run
print(Path(run.dir).absolute() / run.name / "checkpoints")
