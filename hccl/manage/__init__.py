"""Ranks and groups: `hccl.manage.api`."""
