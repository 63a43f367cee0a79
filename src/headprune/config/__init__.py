"""Settings of the library: frozen, validated, written beside every result."""

from headprune.config.base import Settings as Settings
from headprune.config.base import build as build
from headprune.config.data import CalibrationConfig as CalibrationConfig
from headprune.config.data import DataConfig as DataConfig
from headprune.config.data import Domain as Domain
from headprune.config.data import Domains as Domains
from headprune.config.data import data_config as data_config
from headprune.config.data import data_configs as data_configs
from headprune.config.data import domains as domains
from headprune.config.data import sequences_per_pass as sequences_per_pass
from headprune.config.stages import *  # noqa: F403  (every name of it is a setting)
from headprune.config.values import MOST_STEPS as MOST_STEPS
from headprune.config.values import Count as Count
from headprune.config.values import Dtype as Dtype
from headprune.config.values import NonNegativeInt as NonNegativeInt
