"""Imported once by the fork server of engines on CPU, so that schedulers start with SGLang imported."""

from megarl.cpu import sglang_patches
from megarl.rollout.sglang import scheduler

scheduler.leave_out_megatron()
with sglang_patches.quiet_import():
    sglang_patches.prepare()
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
