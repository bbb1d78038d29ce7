"""Errors a person can act on: what was given, what is allowed, what to do.

Every refusal of ours derives from `AdaptiveLoadError`. The command line turns it into exit code 2 and prints
the message without a traceback; anything else is a fault of ours and exits with 1.
"""


class AdaptiveLoadError(Exception):
    """Bad usage or bad input. The message names the thing, what was given, what is allowed, what to do."""


class ConfigError(AdaptiveLoadError):
    """A ds_config key of ours is wrong."""


class CorpusError(AdaptiveLoadError):
    """A shard, a manifest or a source file cannot be used."""


class PlanError(AdaptiveLoadError):
    """A plan cannot be made, or a saved position does not belong to this plan."""


class TooFewForAStep(PlanError):
    """With tail "drop", the samples do not fill one step."""


class CalibrationError(AdaptiveLoadError):
    """A scan or a calibration file cannot be used."""


class PatchError(AdaptiveLoadError):
    """Code cannot be patched, or a patch cannot be taken back."""
