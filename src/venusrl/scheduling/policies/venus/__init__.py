"""The policy of this project: group frontier, KV by value, one queue for all workers (see ``policy``)."""

from venusrl.scheduling.policies.venus.config import VenusConfig
from venusrl.scheduling.policies.venus.policy import Venus

__all__ = ["Venus", "VenusConfig"]
