"""Patches with which Megatron and SGLang work without a GPU; nothing that a GPU needs but `quiet_import`."""
