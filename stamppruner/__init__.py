"""Set-based task-adaptive meta-pruning: train a backbone once, give every data set its own net."""

from stamppruner.budget import Budget
from stamppruner.certificate import Equivalence, check_equivalence, shrink
from stamppruner.channels import ChannelGraph, ChannelGroup, ChannelPlan
from stamppruner.config import STAMPConfig
from stamppruner.diagnostics import Diagnosis, diagnose
from stamppruner.errors import StampError
from stamppruner.export import (
    ExportReport,
    export_onnx,
    export_program,
    export_state_dict,
    from_pretrained,
    push_to_hub,
    recipe,
    save_pretrained,
)
from stamppruner.finetune import evaluate, finetune
from stamppruner.gates import Gates, mask
from stamppruner.pareto import Pareto
from stamppruner.pruner import STAMPPruner
from stamppruner.reinitialise import reinitialise_
from stamppruner.result import PruneResult
from stamppruner.shortcuts import apply_projections, project_shortcuts, projections
from stamppruner.slim import describe, load_slim
from stamppruner.swap import SwapTest, swap_test
from stamppruner.tasks import LoaderTasks, Task, TaskSampler
from stamppruner.trace import trace_channels

__all__ = [
    "STAMPPruner",
    "STAMPConfig",
    "Budget",
    "PruneResult",
    "Pareto",
    "TaskSampler",
    "LoaderTasks",
    "Task",
    "finetune",
    "evaluate",
    "reinitialise_",
    "swap_test",
    "SwapTest",
    "diagnose",
    "Diagnosis",
    "load_slim",
    "describe",
    "export_onnx",
    "export_program",
    "export_state_dict",
    "recipe",
    "ExportReport",
    "save_pretrained",
    "from_pretrained",
    "push_to_hub",
    "trace_channels",
    "project_shortcuts",
    "projections",
    "apply_projections",
    "ChannelGraph",
    "ChannelGroup",
    "ChannelPlan",
    "Gates",
    "mask",
    "shrink",
    "check_equivalence",
    "Equivalence",
    "StampError",
]
