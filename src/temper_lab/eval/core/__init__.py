"""CORE: 22 tasks of three kinds, from a bundle of files."""

from temper_lab.eval.core.bundle import Bundle, Task, load_bundle
from temper_lab.eval.core.scoring import Partial, evaluate_task
from temper_lab.eval.core.summary import CORE_TASKS, GROUPS, TaskResult, centered, core, groups

__all__ = [
    "CORE_TASKS",
    "GROUPS",
    "Bundle",
    "Partial",
    "Task",
    "TaskResult",
    "centered",
    "core",
    "evaluate_task",
    "groups",
    "load_bundle",
]
