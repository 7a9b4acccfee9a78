"""Imported once by the fork server of engines on CPU, so that schedulers start with SGLang imported."""

from megarl.rollout.sglang import cpu, scheduler

scheduler.leave_out_megatron()
cpu.prepare()
with cpu.quiet_import():
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
