"""Imported once by the fork server of engines on CPU, so that schedulers start with SGLang imported."""

from megarl.cpu import sglang_patches
from megarl.rollout.sglang import scheduler

scheduler.leave_out_megatron()
sglang_patches.prepare()
with sglang_patches.quiet_import():
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
