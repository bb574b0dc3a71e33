"""Provides ranks and groups of ranks: `hccl.manage.api`."""
