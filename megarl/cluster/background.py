"""What goes on while the controller waits for something else."""

from __future__ import annotations
