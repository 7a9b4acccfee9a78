"""Imported once by the fork server of an engine on CPU, so that its schedulers start with the imports done."""

from megarl.rollout.sglang import cpu

cpu.prepare()
with cpu.quiet_import():
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
