"""stamppruner."""

from stamppruner.certificate import check_equivalence, shrink
from stamppruner.channels import ChannelGraph, ChannelGroup, ChannelPlan
from stamppruner.gates import Gates, mask
from stamppruner.trace import trace_channels
