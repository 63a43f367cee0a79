"""Criteria: how much a head matters. One file each; a new one is a row here."""

from headprune.errors import PlanError
from headprune.evidence.criteria.compensated import compensated
from headprune.evidence.criteria.confidence import confidence
from headprune.evidence.criteria.fisher import fisher
from headprune.evidence.criteria.fluctuation import fluctuation
from headprune.evidence.criteria.gates import gates
from headprune.evidence.criteria.gradient import gradient
from headprune.evidence.criteria.leave_one_out import leave_one_out
from headprune.evidence.criteria.magnitude import magnitude
from headprune.evidence.criteria.random import random
from headprune.evidence.criteria.reconstruction import reconstruction
from headprune.evidence.criteria.spec import Activations, Criterion, Need, UnitEvidence, Units
from headprune.evidence.criteria.wanda import wanda
from headprune.registry import Registry

__all__ = ["CRITERIA", "Activations", "Criterion", "Need", "UnitEvidence", "Units"]

CRITERIA: Registry[Criterion] = Registry("criterion", PlanError)
CRITERIA.add("gradient", gradient)
CRITERIA.add("fisher", fisher)
CRITERIA.add("fluctuation", fluctuation)
CRITERIA.add("wanda", wanda)
CRITERIA.add("reconstruction", reconstruction)
CRITERIA.add("compensated", compensated)
CRITERIA.add("leave-one-out", leave_one_out)
CRITERIA.add("confidence", confidence)
CRITERIA.add("magnitude", magnitude)
CRITERIA.add("random", random)
CRITERIA.add("gates", gates)
CRITERIA.freeze()
