"""Trackers without a network: W&B offline, MLflow in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of MLflow's file store; the clients' own variables say so, and hold a secret."""
    store = tmp_path / "mlflow"
    for name in (
        "WANDB_PROJECT",
        "WANDB_DIR",
        "WANDB_BASE_URL",
        "MLFLOW_EXPERIMENT_NAME",
        "MLFLOW_TRACKING_USERNAME",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # of whoever runs the tests no key is read
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    return store
