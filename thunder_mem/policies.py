"""Ready policies for ``recompute=``, and the argument and result of your own policies.

The guide is `docs/guides/patterns.md`; how answers become constraints stands in `thunder_mem.user_choices.policy`.
"""

from thunder_mem.user_choices.policy import (
    Action,
    OpInfo,
    Policy,
    every_second_matmul,
    first_of,
    keep_everything,
    offload_everything,
    recompute_everything,
    save_between_layers,
    save_by_name,
    save_only_attention_outputs,
    save_only_matmul_outputs,
)

__all__ = [
    "Action",
    "OpInfo",
    "Policy",
    "every_second_matmul",
    "first_of",
    "keep_everything",
    "offload_everything",
    "recompute_everything",
    "save_between_layers",
    "save_by_name",
    "save_only_attention_outputs",
    "save_only_matmul_outputs",
]
