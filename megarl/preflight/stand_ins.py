"""A recipe on a machine that has none of its files: what stands in for them, and what cannot be checked."""

from __future__ import annotations

from pathlib import Path

from megarl.config import Recipe


def stand_ins(recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """The recipe with stand-ins for what is not on this machine, and the absent files in words, by recipe key.

    The folder model.config stands in for the policy's checkpoint, and the policy's for the other models' checkpoints.
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
            stands_in = recipe.model.path if branch == "reward_model" else None  # without a path there is none
            recipe = recipe.model_copy(update={branch: own.model_copy(update={"path": stands_in})})
    return recipe, absent


def _has_config(path: str) -> bool:
    return (Path(path) / "config.json").is_file()
