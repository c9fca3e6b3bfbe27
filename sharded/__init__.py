"""Megatron-style tensor, pipeline and data parallelism on torch.distributed."""
