"""A recipe on a machine that has none of its files: what can be read in their place, and what cannot be known."""

from __future__ import annotations

from pathlib import Path

from megarl.config import Recipe


def at_hand(recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """The recipe as far as its files are here, and by key what is not.

    The folder model.config takes the place of the checkpoint; another model beside it is taken to be of its kind.
    """
    absent = {}
    model = recipe.model
    if model.config and not _has_config(model.path):
        absent["model.path"] = f"{model.path}: weights and tokenizer (its shape is from {model.config})"
        recipe = recipe.model_copy(update={"model": model.model_copy(update={"path": model.config})})
    data = {key: file.path for key, file in recipe.data.files.items()}
    absent |= {key: f"{path}: the data" for key, path in data.items() if not Path(path).is_file()}
    for branch in ("critic", "reward_model", "reference"):
        own = getattr(recipe, branch)
        if own.path and not _has_config(own.path):
            absent[f"{branch}.path"] = f"{own.path}: another model's folder"
            stands_in = recipe.model.path if branch == "reward_model" else None  # its path says that there is one
            recipe = recipe.model_copy(update={branch: own.model_copy(update={"path": stands_in})})
    return recipe, absent


def _has_config(path: str) -> bool:
    return (Path(path) / "config.json").is_file()
